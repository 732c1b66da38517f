"""Slices of tokens, and what JAX's transformations ask of arrays that a function makes itself.

Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop carries
must vary over as many axes at its beginning as at its end, but an array that is made from a shape varies over none.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

X = TypeVar("X")


def slice_tokens(arrays: X, i: Array, size: int, axis: int = -2) -> X:
    """The i-th `size` tokens of every array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, x.ndim + axis), arrays)


def write(arrays: X, parts: X, i: Array, axis: int = -2) -> X:
    """Arrays with their i-th part, of the parts' size, overwritten."""

    def write_one(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], x.ndim + axis)

    return jax.tree.map(write_one, arrays, parts)


def vary_together(*trees: Any) -> Any:
    """The trees of arrays, each array varying over all mesh axes over which any of them does."""
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(trees)))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees)


def full(like: Array, shape: tuple[int, ...], fill: float) -> Array:
    """Array [*batch, *shape] of a number, for an array `like` [*batch, T, K], of its dtype."""
    return jnp.full((*like.shape[:-2], *shape), fill, like.dtype)


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


def _varying(x: Array) -> frozenset[Any]:
    """The mesh axes over which an array varies; the name of the attribute depends on JAX's version."""
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
