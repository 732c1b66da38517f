"""The dense map, and how its parameters and the embeddings are initialized."""

from functools import partial
from typing import Any

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
    """y = x W + b, with inputs of the product in `dtype`, summed in float32 at least; y is rounded to `dtype`.

    W and b start uniform in (-1, 1) / sqrt(fan_in); with an `init_std`, W starts normal with this
    standard deviation, and b zero. rounded = False leaves y as it is summed: for logarithms.
    """

    features: int
    dtype: str
    use_bias: bool = True
    init_std: float | None = None
    rounded: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch fan_in"]) -> Float[Array, "*batch {self.features}"]:
        kernel, bias = weights_of(self, (x.shape[-1], self.features), self.init_std, self.use_bias)
        return matmul(x, kernel, self.dtype, bias, self.rounded)


class HeadsDense(nn.Module):
    """y = x W + b of H = n_heads heads, in parts [B, H, T, size] of these sizes; W [fan_in, H sum(sizes)], by heads.

    Each part is a product of its own, which writes it where it is read. One token's is a single product, as the parts
    of W would be copied. Otherwise as `Dense`.
    """

    n_heads: int
    sizes: tuple[int, ...]
    dtype: str
    init_std: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T fan_in"]) -> list[Float[Array, "B H T size"]]:
        n_batch, n_tokens, fan_in = x.shape
        kernel, bias = weights_of(self, (fan_in, self.n_heads * sum(self.sizes)), self.init_std)

        def multiply(kernel: Array, bias: Array) -> Array:
            y = matmul(x, kernel.reshape(fan_in, -1), self.dtype, bias.reshape(-1), rounded=True)
            return y.reshape(n_batch, n_tokens, self.n_heads, -1).swapaxes(1, 2)

        cuts = np.cumsum(self.sizes)[:-1]
        if n_tokens == 1:
            return jnp.split(multiply(kernel, bias), cuts, axis=-1)
        of_heads = (jnp.split(w.reshape(*w.shape[:-1], self.n_heads, -1), cuts, axis=-1) for w in (kernel, bias))
        return [multiply(*part) for part in zip(*of_heads, strict=True)]


def weights_of(
    module: nn.Module, shape: tuple[int, int], init_std: float | None, use_bias: bool = True
) -> tuple[Any, Any]:
    """The parameters "kernel" of this shape and "bias" of a dense map, None without one; initialized as in `Dense`."""
    fan_in, features = shape
    kernel = module.param("kernel", weight_init(fan_in, init_std), shape)
    bias_init = uniform_init(fan_in) if init_std is None else nn.initializers.zeros
    return kernel, module.param("bias", bias_init, (features,)) if use_bias else None


def weight_init(fan_in: int, init_std: float | None) -> Initializer:
    """Initializer of matrices and embeddings: normal with this standard deviation, or `uniform_init` (None)."""
    return uniform_init(fan_in) if init_std is None else nn.initializers.normal(init_std)


def uniform_init(fan_in: int) -> Initializer:
    """Initializer uniform(-1, 1) / sqrt(fan_in)."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / jnp.sqrt(fan_in).astype(dtype)

    return init


def matmul(
    x: Float[Array | np.ndarray, "*batch N K"],
    w: Float[Array | np.ndarray, "K M"],
    dtype: str,
    bias: Float[Array | np.ndarray, " M"] | None = None,
    rounded: bool = False,
) -> Float[Array, "*batch N M"]:
    """x w + bias, with inputs in `dtype`, accumulated in float32 at least; so are its gradients, in reverse mode.

    rounded: whether the product, and its sum with the bias, are rounded to `dtype`. Then GPUs write nothing larger.
    """
    bias = None if bias is None else jnp.asarray(bias)
    return checkpoint_name(_affine(jnp.asarray(x), jnp.asarray(w), bias, dtype, rounded), PRODUCT)


# JAX's own gradient multiplies the float32 cotangent, which matrix units take at a fraction of the rate of `dtype`, and
# sums the bias's in the dtype of y.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _affine(x: Array, w: Array, bias: Array | None, dtype: str, rounded: bool) -> Array:
    y = _product("...nk,km->...nm", x, w, dtype, rounded)
    return y if bias is None else y + bias.astype(y.dtype)


@usual_promotion
def _forward(
    x: Array, w: Array, bias: Array | None, dtype: str, rounded: bool
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return _affine(x, w, bias, dtype, rounded), (x, w, bias)


@usual_promotion
def _backward(
    dtype: str, rounded: bool, residuals: tuple[Array, Array, Array | None], dy: Array
) -> tuple[Array, Array, Array | None]:
    x, w, bias = residuals
    dx = _product("...nm,km->...nk", dy, w, dtype)
    dw = _product("...nk,...nm->km", x, dy, dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=range(dy.ndim - 1), dtype=bias.dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype), dbias


_affine.defvjp(_forward, _backward)


def _product(axes: str, a: Array, b: Array, dtype: str, rounded: bool = False) -> Array:
    of_sums = dtype if rounded else jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum(axes, a.astype(dtype), b.astype(dtype), preferred_element_type=of_sums)
