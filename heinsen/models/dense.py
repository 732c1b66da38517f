"""The dense map, and how its parameters and the embeddings are initialized."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Dense(nn.Module):
    """y = x W + b, with inputs of the product in `dtype`; y and its accumulator are float32 at least.

    W and b start uniform in (-1, 1) / sqrt(fan_in); with a `deviation`, W starts normal with it and b zero.
    """

    features: int
    dtype: str
    use_bias: bool = True
    deviation: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch fan_in"]) -> Float[Array, "*batch {self.features}"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", weight_init(fan_in, self.deviation), (fan_in, self.features))
        y = matmul(x, kernel, self.dtype)
        if not self.use_bias:
            return y
        bias_init = uniform_init(fan_in) if self.deviation is None else nn.initializers.zeros
        return y + self.param("bias", bias_init, (self.features,))


def weight_init(fan_in: int, deviation: float | None) -> Initializer:
    """Initializer of matrices and embeddings: normal with this deviation, or `uniform_init` (None)."""
    return uniform_init(fan_in) if deviation is None else nn.initializers.normal(deviation)


def uniform_init(fan_in: int) -> Initializer:
    """Initializer uniform(-1, 1) / sqrt(fan_in)."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / jnp.sqrt(fan_in).astype(dtype)

    return init


def matmul(
    x: Float[Array | np.ndarray, "*batch N K"], w: Float[Array | np.ndarray, "K M"], dtype: str
) -> Float[Array, "*batch N M"]:
    """x w, with inputs in `dtype`, accumulated in float32 at least."""
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=accumulator)
