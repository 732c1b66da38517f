"""Parameters by name, the path of each array joined with dots, and as the state_dict of a PyTorch module.

Our parameters stack those of several layers in one array, where a module has one array for each layer. Our matrices
("kernel") are [in, out], those of a module ("weight" of a Linear) [out, in].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.errors import HeinsenError
from heinsen.models import ModelConfig, Params, abstract_params

Shapes = dict[str, tuple[int, ...]]


class InteropError(HeinsenError, ValueError):
    """Parameters that do not fit a model, or an exported folder that is missing, damaged or in the way."""


class Pair(NamedTuple):
    """A tensor of a module, and where it is in our parameters."""

    ours: str
    place: int | None  # in the stack of layers; None: it is no stack
    theirs: str


def to_state_dict(pairs: Sequence[Pair], shapes: Shapes, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters of these shapes to a state_dict, in their dtypes. Raises InteropError if they do not fit."""
    arrays = flatten(params)
    check_arrays(shapes, arrays, "parameters")
    return {
        theirs: np.asarray(_transpose_kernel(ours, arrays[ours] if place is None else arrays[ours][place]), order="C")
        for ours, place, theirs in pairs
    }


def from_state_dict(pairs: Sequence[Pair], shapes: Shapes, state_dict: Mapping[str, np.ndarray]) -> Params:
    """Convert a state_dict to our parameters of these shapes, in its dtypes.

    One InteropError names all tensors that are missing, unknown or of a wrong shape.
    """
    arrays = {name: np.asarray(x) for name, x in state_dict.items()}
    wanted = {}
    for ours, place, theirs in pairs:
        shape = shapes[ours] if place is None else shapes[ours][1:]
        wanted[theirs] = shape[::-1] if ours.endswith("kernel") else shape
    check_arrays(wanted, arrays, "tensors")
    single: dict[str, np.ndarray] = {}
    stacked: dict[str, list[np.ndarray]] = {}
    for ours, place, theirs in pairs:
        x = _transpose_kernel(ours, arrays[theirs])
        if place is None:
            single[ours] = x
        else:
            stacked.setdefault(ours, []).append(x)
    return unflatten(single | {ours: np.stack(layers) for ours, layers in stacked.items()})


def _transpose_kernel(ours: str, x: np.ndarray) -> np.ndarray:
    return x.T if ours.endswith("kernel") else x


def shapes_of(config: ModelConfig) -> Shapes:
    """Return the shape of each of the model's parameters."""
    return {name: x.shape for name, x in _named_leaves(abstract_params(config))}


def flatten(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters by name."""
    return {name: np.asarray(x) for name, x in _named_leaves(params)}


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def unflatten(arrays: Mapping[str, np.ndarray]) -> Params:
    """Invert `flatten`."""
    params: Params = {}
    for name, x in arrays.items():
        *groups, last = name.split(".")
        group = params
        for key in groups:
            group = group.setdefault(key, {})
        group[last] = x
    return params


def check_arrays(wanted: Shapes, found: Mapping[str, np.ndarray], what: str) -> None:
    """Raise one InteropError that names every array that is missing, unknown, or of a wrong shape or type."""
    lines = []
    if missing := [name for name in wanted if name not in found]:
        lines.append(f"missing: {', '.join(missing)}")
    if unknown := [name for name in found if name not in wanted]:
        lines.append(f"unknown: {', '.join(unknown)}")
    for name in (name for name in wanted if name in found):
        if found[name].shape != wanted[name]:
            lines.append(f"{name} is {list(found[name].shape)}, not {list(wanted[name])}")
        elif not jnp.issubdtype(found[name].dtype, jnp.floating):
            lines.append(f"{name} is {found[name].dtype}, not a floating-point type")
    if lines:
        raise InteropError(f"the {what} do not fit the model:\n  " + "\n  ".join(lines))
