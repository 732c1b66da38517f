"""The feature map: the queries and keys of a head become exponents by learned maps, one for queries, one for keys.

    exponents = log f(A x + b)

`heinsen.attention` reads them, so that a query's weight of a key is sum_i f(A q + b)_i f(A' k + b')_i. Features come in
pairs: A begins as a matrix of directions and its negative, b as zero. With 2 K features the directions are the axes,
and A x begins as [x, -x].

Axes: B batch, H heads, T tokens, K features of queries and keys, F features of the map.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen.models.dense import matmul

# log f by the name of f.
LOG_FEATURES: dict[str, Callable[[Array], Array]] = {
    "exponential": lambda z: z,
    "elu": lambda z: jnp.where(z > 0, jnp.log1p(jnp.maximum(z, 0)), z),  # elu + 1
    "relu": lambda z: jnp.log(nn.relu(z) + 1e-6),
    "softmax": nn.log_softmax,  # over the features, as in published code of Hedgehog (Zhang et al., 2024)
}


class FeatureMap(nn.Module):
    """Exponents of n_features features (`LOG_FEATURES`). The products' inputs have `dtype`."""

    name_of_f: str
    n_features: int
    dtype: str

    @nn.compact
    def __call__(
        self, q: Float[Array, "B H T K"], k: Float[Array, "B H T K"]
    ) -> tuple[Float[Array, "B H T F"], Float[Array, "B H T F"]]:
        _, n_heads, _, d_key = q.shape
        kernel = self.param("kernel", paired_directions, (2, n_heads, d_key, self.n_features))
        bias = self.param("bias", nn.initializers.zeros, (2, n_heads, 1, self.n_features))
        of_heads = jax.vmap(lambda x, a: matmul(x, a, self.dtype), in_axes=(1, 0), out_axes=1)
        q, k = (LOG_FEATURES[self.name_of_f](of_heads(x, a) + b) for x, a, b in zip((q, k), kernel, bias, strict=True))
        return q, k


def paired_directions(key: Array, shape: tuple[int, int, int, int]) -> Float[Array, "2 H K F"]:
    """Initializer of A: unit directions and their negatives, the same for queries and keys.

    The axes are among the directions if there is room; the others are random.
    """
    _, n_heads, d_key, n_features = shape
    axes = jnp.eye(d_key)[:, : d_key if n_features >= 2 * d_key else 0]
    others = jax.random.normal(key, (n_heads, d_key, n_features // 2 - axes.shape[1]))
    others = others / jnp.linalg.norm(others, axis=1, keepdims=True)
    directions = jnp.concatenate([jnp.broadcast_to(axes, (n_heads, *axes.shape)), others], axis=-1)
    return jnp.broadcast_to(jnp.concatenate([directions, -directions], axis=-1), shape)
