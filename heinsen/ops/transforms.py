"""What JAX's transformations ask of arrays that a function makes itself.

Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop carries
must vary over as many axes at its beginning as at its end, but an array that is made from a shape varies over none.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Trees = TypeVar("Trees", bound=tuple[Any, ...])


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


def _varying(x: Array) -> frozenset[Any]:
    """The mesh axes over which an array varies; the name of the attribute depends on JAX's version."""
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
