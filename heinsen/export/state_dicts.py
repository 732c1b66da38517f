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

Arrays = Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


class ExportError(HeinsenError, ValueError):
    """Parameters that do not fit a model, or an exported folder that is missing, damaged or in the way."""


class Tensor(NamedTuple):
    """A tensor of a module, and where it is in our parameters."""

    name: str
    ours: str
    layer: int | None  # in the stack of layers; None: it is no stack

    def take(self, arrays: Arrays) -> np.ndarray:
        """Return the tensor of our arrays."""
        x = arrays[self.ours] if self.layer is None else arrays[self.ours][self.layer]
        return self.transpose(x)

    def transpose(self, x: np.ndarray) -> np.ndarray:
        """Turn a matrix of ours into one of the module, and back."""
        return x.T if self.ours.endswith("kernel") and self.name.endswith("weight") else x


def to_state_dict(config: ModelConfig, tensors: Sequence[Tensor], params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to a state_dict of contiguous arrays, in their dtypes.

    safetensors and torch write memory in order, whatever the strides.

    Raises ExportError if they do not fit the config.
    """
    arrays = {name: np.asarray(x) for name, x in named_leaves(params)}
    _check_arrays(_shapes(config), arrays, "parameters")
    return {tensor.name: np.asarray(tensor.take(arrays), order="C") for tensor in tensors}


def from_state_dict(config: ModelConfig, tensors: Sequence[Tensor], state_dict: Arrays) -> Params:
    """Convert a state_dict to our parameters, in its dtypes.

    One ExportError names all tensors that are missing, unknown or of a wrong shape.
    """
    found = {name: np.asarray(x) for name, x in state_dict.items()}
    empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in _shapes(config).items()}
    _check_arrays({tensor.name: tensor.take(empty).shape for tensor in tensors}, found, "tensors")
    arrays: dict[str, np.ndarray] = {}
    for ours in empty:
        own = [tensor for tensor in tensors if tensor.ours == ours]
        layers = [tensor.transpose(found[tensor.name]) for tensor in own]
        arrays[ours] = layers[0] if own[0].layer is None else np.stack(layers)
    return _nest(arrays)


def from_arrays(config: ModelConfig, arrays: Mapping[str, np.ndarray | jax.Array]) -> Params:
    """Return the parameters of arrays by name. Raises ExportError if they do not fit the config."""
    _check_arrays(_shapes(config), arrays, "tensors")
    return _nest(arrays)


def own_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the parameters as they are."""
    return [Tensor(name, name, None) for name in parameter_names(config)]


def parameter_names(config: ModelConfig) -> list[str]:
    """Return the names of the model's parameters."""
    return list(_shapes(config))


def _shapes(config: ModelConfig) -> Shapes:
    return {name: x.shape for name, x in named_leaves(abstract_params(config))}


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (name, leaf) of parameters, or of their shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _nest(arrays: Mapping[str, Any]) -> Params:
    params: Params = {}
    for name, x in arrays.items():
        *groups, last = name.split(".")
        group = params
        for key in groups:
            group = group.setdefault(key, {})
        group[last] = x
    return params


def _check_arrays(wanted: Shapes, found: Mapping[str, Any], what: str) -> None:
    """Raise one ExportError that names every array that is missing, unknown, or of a wrong shape or type."""
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
        raise ExportError(f"the {what} do not fit the model:\n  " + "\n  ".join(lines))
