"""Convert parameters to and from the published PyTorch module, and export them to self-contained folders.

    DIR/weights.safetensors   the parameters
    DIR/config.json           `Manifest`: model, tokenizer's name, run, the size and SHA-256 of the weights, its digest
    DIR/README.md             a model card

The paper's model is written in the layout "reference", the published module's state_dict: any tool that reads
safetensors gets what `load_state_dict` takes. Other models are written in the layout "native", under the paths of our
own parameters. Since a safetensors file has no checksum, the manifest holds one, and a digest of its own fields
(`heinsen.files.seal`), which earlier versions did not write.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heinsen.config import ConfigError, from_mapping
from heinsen.errors import HeinsenError
from heinsen.files import atomic_folder, file_sha256, seal, unseal
from heinsen.models import ModelConfig, Params, abstract_params

FORMAT, FORMAT_VERSION = "heinsen export", 1
CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "weights.safetensors", "README.md"
DTYPES = ("float32", "bfloat16")
_LAYOUTS = ("reference", "native")

Shapes = dict[str, tuple[int, ...]]

# Our parameters, by their path joined with dots -> the published module's. Ours stack all layers in one array, theirs
# has one array per layer; our matrices ("kernel") are [in, out], theirs ("weight" of a Linear) [out, in].
_REFERENCE_NAMES = {
    "embedding": "embed.weight",  # tied with the head
    "position.dense.kernel": "embed_pos.dense.weight",
    "position.dense.bias": "embed_pos.dense.bias",
    "layers.norm.scale": "layers.{layer}.feedforward1.0.weight",
    "layers.norm.bias": "layers.{layer}.feedforward1.0.bias",
    "layers.w1.kernel": "layers.{layer}.feedforward1.1.weight",
    "layers.w1.bias": "layers.{layer}.feedforward1.1.bias",
    "layers.w2.kernel": "layers.{layer}.feedforward2.0.weight",
    "layers.w2.bias": "layers.{layer}.feedforward2.0.bias",
    "layers.w3.kernel": "layers.{layer}.feedforward2.2.weight",
    "norm.scale": "lnorm.weight",
    "norm.bias": "lnorm.bias",
}


class InteropError(HeinsenError, ValueError):
    """Parameters that do not fit a model, or an exported folder that is missing, damaged or in the way."""


# ---- the published module's layout ---------------------------------------------------------------


def is_reference_model(config: ModelConfig) -> bool:
    """Return whether the model is that of the published module: its attention, and its parameters' names and shapes."""
    is_published = all(mixer.is_published for mixer in config.mixers)
    return is_published and _shapes(config) == _reference_model_shapes(config)


def to_reference_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to the published module's state_dict, in their dtypes; every array is contiguous.

    Raises InteropError for any other model, and for parameters that do not fit the config.
    """
    _require_reference(config)
    arrays = _flatten(params)
    _check(_reference_model_shapes(config), arrays, "parameters")
    return {
        theirs: np.asarray(_transpose_kernel(ours, arrays[ours] if layer is None else arrays[ours][layer]), order="C")
        for ours, theirs, layer in _pairs(config)
    }


def from_reference_state_dict(config: ModelConfig, state_dict: Mapping[str, np.ndarray]) -> Params:
    """Convert the published module's state_dict to our parameters, in its dtypes.

    Raises InteropError for any other model; one error names all tensors that are missing, unknown or of a wrong shape.
    """
    _require_reference(config)
    arrays = {name: np.asarray(x) for name, x in state_dict.items()}
    shapes = _reference_model_shapes(config)
    wanted = {}
    for ours, theirs, layer in _pairs(config):
        shape = shapes[ours] if layer is None else shapes[ours][1:]
        wanted[theirs] = shape[::-1] if ours.endswith("kernel") else shape
    _check(wanted, arrays, "tensors")
    single: dict[str, np.ndarray] = {}
    per_layer: dict[str, list[np.ndarray]] = {}
    for ours, theirs, layer in _pairs(config):
        x = _transpose_kernel(ours, arrays[theirs])
        if layer is None:
            single[ours] = x
        else:
            per_layer.setdefault(ours, []).append(x)
    return _unflatten(single | {ours: np.stack(layers) for ours, layers in per_layer.items()})


def _pairs(config: ModelConfig) -> Iterator[tuple[str, str, int | None]]:
    """Yield our name, the published name, and the layer or None, of each of the published module's tensors."""
    for ours, theirs in _REFERENCE_NAMES.items():
        for layer in range(config.n_layers) if "{layer}" in theirs else (None,):
            yield ours, theirs.format(layer=layer), layer


def _transpose_kernel(ours: str, x: np.ndarray) -> np.ndarray:
    return x.T if ours.endswith("kernel") else x


def _reference_model_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the paper's model under our names."""
    n_layers, d = config.n_layers, config.d_model
    wide, values = config.n_heads * (2 * config.d_key + config.d_value), config.n_heads * config.d_value
    return {
        "embedding": (config.padded_vocab_size, d),
        "position.dense.kernel": (d, 2 * d),
        "position.dense.bias": (2 * d,),
        "layers.norm.scale": (n_layers, d),
        "layers.norm.bias": (n_layers, d),
        "layers.w1.kernel": (n_layers, d, wide),
        "layers.w1.bias": (n_layers, wide),
        "layers.w2.kernel": (n_layers, values, 2 * d),
        "layers.w2.bias": (n_layers, 2 * d),
        "layers.w3.kernel": (n_layers, d, d),
        "norm.scale": (d,),
        "norm.bias": (d,),
    }


def _require_reference(config: ModelConfig) -> None:
    if not is_reference_model(config):
        raise InteropError(f"the published module has no such model: {config}. Use save_folder, which writes any model")


# ---- parameters by name --------------------------------------------------------------------------


def _shapes(config: ModelConfig) -> Shapes:
    return {name: x.shape for name, x in _named_leaves(abstract_params(config))}


def _flatten(params: Params) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in _named_leaves(params)}


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _unflatten(arrays: Mapping[str, np.ndarray]) -> Params:
    params: Params = {}
    for name, x in arrays.items():
        *groups, last = name.split(".")
        group = params
        for key in groups:
            group = group.setdefault(key, {})
        group[last] = x
    return params


def _check(wanted: Shapes, found: Mapping[str, np.ndarray], what: str) -> None:
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


# ---- folders -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """Size and checksum of weights.safetensors."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"bytes = {self.bytes}, sha256 = {self.sha256!r}: impossible for a file")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of an exported folder's config.json.

    layout is "reference" or "native"; step and run are the training step and config of the run that was exported.
    """

    format: str
    format_version: int
    layout: str
    dtype: str
    model: ModelConfig
    tokenizer: str
    step: int
    weights: WeightsFile
    run: dict[str, Any]

    def __post_init__(self) -> None:
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout = {self.layout!r}: expected {' or '.join(_LAYOUTS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: expected {' or '.join(DTYPES)}")
        if self.step < 0:
            raise ValueError(f"step = {self.step}: it must not be negative")
        data = self.run.get("data")
        if isinstance(data, dict) and data.get("tokenizer") != self.tokenizer:
            raise ValueError(f"tokenizer = {self.tokenizer!r}, but run.data.tokenizer = {data.get('tokenizer')!r}")


def is_export(folder: Path) -> bool:
    """Return whether `save_folder` wrote this folder, be it whole or damaged."""
    return (folder / WEIGHTS_FILE).is_file() or _holds_manifest(folder)


def _holds_manifest(folder: Path) -> bool:
    try:
        return _is_manifest(json.loads((folder / CONFIG_FILE).read_text()))
    except (OSError, ValueError, RecursionError):
        return False


def _is_manifest(config: Any) -> bool:
    """Return whether the contents of a config.json are an exported folder's rather than a run's."""
    return isinstance(config, dict) and config.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read an exported folder's config.json. Raises InteropError if it is missing, damaged, or of another version."""
    path = folder / CONFIG_FILE
    try:
        mapping = unseal(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise InteropError(f"{folder} holds no exported weights: it has no {CONFIG_FILE}; {_HOW}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InteropError(f"{path} is damaged ({error}): copy the folder again, or {_HOW}") from error
    if not _is_manifest(mapping):
        raise InteropError(f"{folder} holds no exported weights: its {CONFIG_FILE} belongs to something else; {_HOW}")
    if mapping.get("format_version") != FORMAT_VERSION:
        raise InteropError(
            f"{path} has format version {mapping.get('format_version')}, this code reads {FORMAT_VERSION}: use the "
            "version of heinsen that wrote it"
        )
    try:
        return from_mapping(Manifest, mapping, str(path))
    except ConfigError as error:
        raise InteropError(str(error)) from error


_HOW = "write one with `python scripts/export.py --workdir=RUN --out=DIR`"


def load_folder(folder: Path) -> tuple[ModelConfig, str, Params]:
    """Load a folder that `save_folder` wrote.

    Returns:
      The model's config, the tokenizer's name, and the parameters as NumPy arrays of the dtype on disk.

    Raises:
      InteropError: the folder is missing, its weights are damaged in any bit, or they do not fit its config.
    """
    manifest, path = read_manifest(folder), folder / WEIGHTS_FILE
    again = f"copy the folder again, or {_HOW}"
    try:
        size = path.stat().st_size
        if size != manifest.weights.bytes:
            raise InteropError(f"{path} has {size} bytes instead of {manifest.weights.bytes}: {again}")
        if file_sha256(path) != manifest.weights.sha256:
            raise InteropError(f"{path} is damaged, its SHA-256 is not the one in {CONFIG_FILE}: {again}")
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InteropError(f"{path} cannot be read ({error}): {again}") from error
    try:
        if manifest.layout == "reference":
            return manifest.model, manifest.tokenizer, from_reference_state_dict(manifest.model, arrays)
        _check(_shapes(manifest.model), arrays, "tensors")
    except InteropError as error:
        raise InteropError(f"{path}: {error}") from error
    return manifest.model, manifest.tokenizer, _unflatten(arrays)


def save_folder(
    folder: Path,
    config: ModelConfig,
    tokenizer: str,
    params: Params,
    *,
    step: int,
    run: Mapping[str, Any],
    card: str,
    dtype: str = "float32",
    overwrite: bool = False,
) -> Manifest:
    """Write a folder that `load_folder` reads.

    A new folder appears whole or not at all. In an existing one each file is replaced whole; a reader in between finds
    that the weights do not match config.json.

    Args:
      step: training step of the parameters.
      run: the run's whole config, as JSON.
      card: the text of README.md.
      dtype: of the numbers on disk, one of DTYPES; rounded to nearest.
      overwrite: replace the weights of an earlier export. No other folder that holds anything is ever written to.

    Raises:
      InteropError: something is in the way, the parameters do not fit the config, or the folder cannot be written.
        Nothing has changed then.
    """
    if dtype not in DTYPES:
        raise InteropError(f"dtype = {dtype!r}: choose {' or '.join(DTYPES)}")
    _check_free(folder, overwrite)
    layout, arrays = _layout_and_arrays(config, params)
    # safetensors writes memory in order, whatever the strides.
    arrays = {name: np.asarray(x, jnp.dtype(dtype), order="C") for name, x in arrays.items()}
    try:
        with atomic_folder(folder, (WEIGHTS_FILE, CARD_FILE, CONFIG_FILE)) as temporary:
            (temporary / CARD_FILE).write_text(card)
            save_file(arrays, temporary / WEIGHTS_FILE)
            shutil.copymode(temporary / CARD_FILE, temporary / WEIGHTS_FILE)  # safetensors makes it private
            weights = WeightsFile((temporary / WEIGHTS_FILE).stat().st_size, file_sha256(temporary / WEIGHTS_FILE))
            manifest = Manifest(FORMAT, FORMAT_VERSION, layout, dtype, config, tokenizer, step, weights, dict(run))
            (temporary / CONFIG_FILE).write_text(json.dumps(seal(dataclasses.asdict(manifest)), indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise InteropError(f"{folder} cannot be written: {error}. Use another folder, or free some space") from error
    return manifest


def _layout_and_arrays(config: ModelConfig, params: Params) -> tuple[str, dict[str, np.ndarray]]:
    if is_reference_model(config):
        return "reference", to_reference_state_dict(config, params)
    arrays = _flatten(params)
    _check(_shapes(config), arrays, "parameters")
    return "native", arrays


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raise InteropError unless the folder is new, empty, or an export that may be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _holds_manifest(folder):
        raise InteropError(f"{folder} exists and holds something else: use a new folder")
    if not overwrite:
        raise InteropError(f"{folder} holds exported weights: use a new folder, or --overwrite to replace them")
