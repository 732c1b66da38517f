"""The dense map, and how its parameters and the embeddings are initialized."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Initializer
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from heinsen.promotion import usual_promotion

PRODUCT = "product"  # the name of every product, for policies of remat


class Dense(nn.Module):
    """y = x W + b, with inputs of the product in `dtype`; y and its accumulator are float32 at least.

    W and b start uniform in (-1, 1) / sqrt(fan_in); with an `init_std`, W starts normal with this
    standard deviation, and b zero.
    """

    features: int
    dtype: str
    use_bias: bool = True
    init_std: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch fan_in"]) -> Float[Array, "*batch {self.features}"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", weight_init(fan_in, self.init_std), (fan_in, self.features))
        y = matmul(x, kernel, self.dtype)
        if not self.use_bias:
            return y
        bias_init = uniform_init(fan_in) if self.init_std is None else nn.initializers.zeros
        return y + self.param("bias", bias_init, (self.features,))


def weight_init(fan_in: int, init_std: float | None) -> Initializer:
    """Initializer of matrices and embeddings: normal with this standard deviation, or `uniform_init` (None)."""
    return uniform_init(fan_in) if init_std is None else nn.initializers.normal(init_std)


def uniform_init(fan_in: int) -> Initializer:
    """Initializer uniform(-1, 1) / sqrt(fan_in)."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / jnp.sqrt(fan_in).astype(dtype)

    return init


def matmul(
    x: Float[Array | np.ndarray, "*batch N K"], w: Float[Array | np.ndarray, "K M"], dtype: str
) -> Float[Array, "*batch N M"]:
    """x w, with inputs in `dtype`, accumulated in float32 at least; so are its gradients, in reverse mode."""
    return checkpoint_name(_matmul(jnp.asarray(x), jnp.asarray(w), dtype), PRODUCT)


# JAX's own gradient multiplies the float32 cotangent, which matrix units take at a fraction of the rate of `dtype`.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: Array, w: Array, dtype: str) -> Array:
    return _product("...nk,km->...nm", x, w, dtype)


@usual_promotion
def _forward(x: Array, w: Array, dtype: str) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, w, dtype), (x, w)


@usual_promotion
def _backward(dtype: str, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    dx = _product("...nm,km->...nk", dy, w, dtype)
    dw = _product("...nk,...nm->km", x, dy, dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_forward, _backward)


def _product(axes: str, a: Array, b: Array, dtype: str) -> Array:
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum(axes, a.astype(dtype), b.astype(dtype), preferred_element_type=accumulator)
