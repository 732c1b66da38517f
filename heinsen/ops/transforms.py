"""Slices of tokens, and what JAX's transformations ask of arrays that a function makes itself.

Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop carries
must vary over as many axes at its beginning as at its end, but an array that is made from a shape varies over none.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
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

    def axes_of(x: Array) -> frozenset[Any]:
        kind: Any = jax.typeof(x)
        return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # depends on JAX's version

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    axes = frozenset[Any]().union(*map(axes_of, jax.tree.leaves(trees)))
    return jax.tree.map(vary, trees) if axes else trees


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
