"""Arithmetic and trees of arrays that all of ops uses."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from heinsen.logspace import NEG_INF
from heinsen.promotion import usual_promotion

X = TypeVar("X")

ATTENTION = "attention"  # the name of what attention returns, and of what its gradient needs, for policies of remat

Precision = lax.Precision | lax.DotAlgorithmPreset

# Without HIGHEST, TPUs and GPUs round float32 factors to bfloat16 or TF32.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def precision_of(values: Array) -> Precision:
    """Precision of products of factors <= 1 with values, or for their sake: no more than the values have.

    For bfloat16 values, GPUs and TPUs round float32 factors to bfloat16 and sum in float32; CPUs round nothing.
    """
    is_half = values.dtype == jnp.bfloat16
    return lax.DotAlgorithmPreset.BF16_BF16_F32 if is_half else lax.Precision.HIGHEST


@jax.custom_jvp
def safe_divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0, with a gradient of 0 there."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


@safe_divide.defjvp
@usual_promotion
def _safe_divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    ratio = safe_divide(a, b)
    return ratio, safe_divide(da - ratio * db, b)  # JAX's own divides by b * b, which underflows


def safe_log(x: Array) -> Array:
    """log x, with a gradient of 0 at 0."""
    return jnp.where(x == 0, NEG_INF, jnp.log(jnp.where(x == 0, 1.0, x)))


def fill_where(bad: Array, arrays: X, fill: Any = jnp.nan) -> X:
    """Arrays with `fill`, a number or as many arrays, where `bad`, of their leading axes, is true."""
    fills = jax.tree.map(lambda _: fill, arrays) if isinstance(fill, float) else fill
    expand = lambda x: bad.reshape(*bad.shape, *(1,) * (x.ndim - bad.ndim))
    return jax.tree.map(lambda x, fill: jnp.where(expand(x), fill, x), arrays, fills)


def vary_together(*trees: Any) -> Any:
    """The trees of arrays, each array varying over all mesh axes over which any of them does.

    Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop
    carries must vary over as many axes at its beginning as at its end, but an array made from a shape varies over none.
    """

    def axes_of(x: Array) -> frozenset[Any]:
        aval: Any = jax.typeof(x)
        return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # depends on JAX's version

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    axes = frozenset[Any]().union(*map(axes_of, jax.tree.leaves(trees)))
    return jax.tree.map(vary, trees) if axes else trees


def isolate_values(values: Array, signed: bool) -> tuple[Array, Array]:
    """(values [*batch, T, V] with 0 in place of those that are not finite, 0 or NaN [*batch, T] for each token).

    The second is for the keys' weights: masks act on these, so that NaN stays out of what does not see the token.
    """
    is_value = jnp.isfinite(values) if signed else values < jnp.inf
    taint = jnp.where(jnp.all(is_value, axis=-1), 0.0, jnp.nan).astype(values.dtype)
    return jnp.where(is_value, values, 0.0 if signed else NEG_INF), taint


def to_chunks(x: Array, size: int, axis: int, **fill: Any) -> Array:
    """Split the tokens on `axis` (negative) into chunks [N, C]; the last one is filled up as `jnp.pad` does it."""
    axis += x.ndim
    if missing := -x.shape[axis] % size:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], **fill)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def on_automatic_axes(function: Callable[..., tuple[Array, Any]], q: Array, *args: Any) -> tuple[Array, Any]:
    """function(q, *args), whose outputs are y [*batch, T, V] and a tree of arrays [*batch, ...], on any mesh.

    Where q [*batch, T, K] lies on a mesh with explicit axes, the compiler divides the work within, and the outputs are
    divided as q is.
    """
    sharding = jax.typeof(q).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(q, *args)
    axes: list[Any] = [*sharding.spec] + [None] * (q.ndim - len(sharding.spec))
    *batch, tokens, _ = axes
    return jax.sharding.auto_axes(function, out_sharding=(P(*batch, tokens), P(*batch)))(q, *args)


def promote(q: Array, k: Array, values: Array) -> tuple[Array, Array, Array]:
    """The arrays in the dtype of the arithmetic: float32, or wider where one of them is."""
    dtype = jnp.promote_types(jnp.result_type(q, k, values), jnp.float32)
    return q.astype(dtype), k.astype(dtype), values.astype(dtype)


def promote_exponents(q: Array, k: Array, values: Array) -> tuple[Array, Array, Array]:
    """As `promote`, but bfloat16 values stay: products with them need no more (`precision_of`)."""
    q, k, promoted = promote(q, k, values)
    return q, k, values if values.dtype == jnp.bfloat16 else promoted
