"""Folders of exported weights.

    DIR/weights.safetensors   the parameters
    DIR/config.json           `Manifest`: model, tokenizer's name, run, the size and SHA-256 of the weights, its digest
    DIR/README.md             a model card

Layouts: the paper's model is written as "reference", the published module's state_dict: any tool that reads
safetensors gets what `load_state_dict` takes. Other models are "native", under the paths of our own parameters. On
demand a folder is "huggingface", with the other names and files that `heinsen.interop.huggingface` describes. Since a
safetensors file has no checksum, the manifest holds one, and a digest of its own fields (`heinsen.files.seal`), which
earlier versions did not write. Where transformers has written the weights anew, there is no checksum of them.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heinsen.config import ConfigError, from_mapping
from heinsen.files import atomic_folder, file_sha256, seal, unseal
from heinsen.interop import huggingface
from heinsen.interop.arrays import InteropError, check_arrays, flatten, shapes_of, unflatten
from heinsen.interop.reference import from_reference_state_dict, is_reference_model, to_reference_state_dict
from heinsen.models import ModelConfig, Params

FORMAT, FORMAT_VERSION = "heinsen export", 1
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
WEIGHTS_FILE, HUGGINGFACE_WEIGHTS_FILE = _WEIGHTS_FILES = "weights.safetensors", "model.safetensors"
DTYPES = ("float32", "bfloat16")
_LAYOUTS = ("reference", "native", "huggingface")


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """Size and checksum of the file of weights."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"bytes = {self.bytes}, sha256 = {self.sha256!r}: impossible for a file")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of an exported folder's config.json; in the layout "huggingface", of its field "heinsen".

    layout is one of _LAYOUTS; step and run are the training step and config of the run that was exported.
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
            raise ValueError(f"layout = {self.layout!r}: expected {', '.join(_LAYOUTS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: expected {' or '.join(DTYPES)}")
        if self.step < 0:
            raise ValueError(f"step = {self.step}: it must not be negative")


def is_export(folder: Path) -> bool:
    """Return whether `save_folder` wrote this folder, be it whole or damaged."""
    return any((folder / name).is_file() for name in _WEIGHTS_FILES) or _holds_manifest(folder)


def _holds_manifest(folder: Path) -> bool:
    try:
        return _is_manifest(_record(json.loads((folder / CONFIG_FILE).read_text())))
    except (OSError, ValueError, RecursionError):
        return False


def _record(config: Any) -> Any:
    """Return the export's own record in the contents of a config.json."""
    is_transformers = isinstance(config, dict) and config.get("model_type") == huggingface.RECORD
    return config.get(huggingface.RECORD) if is_transformers else config


def _is_manifest(config: Any) -> bool:
    """Return whether the contents of a config.json are an exported folder's rather than a run's."""
    return isinstance(config, dict) and config.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read an exported folder's config.json. Raises InteropError if it is missing, damaged, or of another version."""
    return _read_config(folder)[0]


def _read_config(folder: Path) -> tuple[Manifest, bool]:
    """Return the manifest, and whether transformers has written the folder since. Raises InteropError."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
        mapping = unseal(_record(config))
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
        return from_mapping(Manifest, mapping, str(path)), "transformers_version" in config
    except ConfigError as error:
        raise InteropError(str(error)) from error


_HOW = "write one with `python scripts/export.py --workdir=RUN --out=DIR`"


def load_folder(folder: Path) -> tuple[ModelConfig, str, Params]:
    """Load a folder that `save_folder` wrote, or transformers' save_pretrained from one of layout "huggingface".

    Returns:
      The model's config, the tokenizer's name, and the parameters as NumPy arrays of the dtype on disk.

    Raises:
      InteropError: the folder is missing, its weights are damaged in any bit, or they do not fit its config. (What
        transformers wrote has no checksum.)
    """
    manifest, is_rewritten = _read_config(folder)
    path, again = folder / _weights_file(manifest.layout), f"copy the folder again, or {_HOW}"
    if Path(f"{path}.index.json").exists():
        again = "save it with transformers as one file: save_pretrained(DIR, max_shard_size='1TB')"
    try:
        if not is_rewritten:
            _check_whole(path, manifest.weights, again)
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InteropError(f"{path} cannot be read ({error}): {again}") from error
    try:
        if manifest.layout == "reference":
            return manifest.model, manifest.tokenizer, from_reference_state_dict(manifest.model, arrays)
        if manifest.layout == "huggingface":
            return manifest.model, manifest.tokenizer, huggingface.from_huggingface_state_dict(manifest.model, arrays)
        check_arrays(shapes_of(manifest.model), arrays, "tensors")
    except InteropError as error:
        raise InteropError(f"{path}: {error}") from error
    return manifest.model, manifest.tokenizer, unflatten(arrays)


def _check_whole(path: Path, weights: WeightsFile, again: str) -> None:
    """Raise InteropError, with what to do, if the file is not the one that was exported."""
    size = path.stat().st_size
    if size != weights.bytes:
        raise InteropError(f"{path} has {size} bytes instead of {weights.bytes}: {again}")
    if file_sha256(path) != weights.sha256:
        raise InteropError(f"{path} is damaged, its SHA-256 is not the one in {CONFIG_FILE}: {again}")


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
    for_transformers: bool = False,
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
      for_transformers: whether to write the layout "huggingface".
      overwrite: replace the weights of an earlier export of the same files. No other folder that holds anything is ever
        written to.

    Raises:
      InteropError: something is in the way, the parameters do not fit the config, or the folder cannot be written.
        Nothing has changed then.
      TokenizerFilesError: the tokenizer's files, which transformers needs, are nowhere.
    """
    if dtype not in DTYPES:
        raise InteropError(f"dtype = {dtype!r}: choose {' or '.join(DTYPES)}")
    layout, arrays = _layout_and_arrays(config, params, for_transformers)
    weights_file = _weights_file(layout)
    _check_free(folder, weights_file, overwrite)
    # safetensors writes memory in order, whatever the strides.
    arrays = {name: np.asarray(x, jnp.dtype(dtype), order="C") for name, x in arrays.items()}
    others = (*huggingface.CODE_FILES, *huggingface.JSON_FILES) if for_transformers else ()
    try:
        with atomic_folder(folder, (*others, weights_file, CARD_FILE, CONFIG_FILE)) as temporary:
            (temporary / CARD_FILE).write_text(card)
            path = temporary / weights_file
            save_file(arrays, path, {"format": "pt"} if for_transformers else None)
            shutil.copymode(temporary / CARD_FILE, path)  # safetensors makes it private
            weights = WeightsFile(path.stat().st_size, file_sha256(path))
            manifest = Manifest(FORMAT, FORMAT_VERSION, layout, dtype, config, tokenizer, step, weights, dict(run))
            record = seal(dataclasses.asdict(manifest))
            if for_transformers:
                huggingface.write_files(temporary, config, tokenizer)
                record = huggingface.transformers_config(record, tokenizer, dtype)
            (temporary / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise InteropError(f"{folder} cannot be written: {error}. Use another folder, or free some space") from error
    return manifest


def _weights_file(layout: str) -> str:
    return HUGGINGFACE_WEIGHTS_FILE if layout == "huggingface" else WEIGHTS_FILE


def _layout_and_arrays(
    config: ModelConfig, params: Params, for_transformers: bool
) -> tuple[str, dict[str, np.ndarray]]:
    if for_transformers:
        return "huggingface", huggingface.to_huggingface_state_dict(config, params)
    if is_reference_model(config):
        return "reference", to_reference_state_dict(config, params)
    arrays = flatten(params)
    check_arrays(shapes_of(config), arrays, "parameters")
    return "native", arrays


def _check_free(folder: Path, weights_file: str, overwrite: bool) -> None:
    """Raise InteropError unless the folder is new, empty, or an export of these files that may be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _holds_manifest(folder):
        raise InteropError(f"{folder} exists and holds something else: use a new folder")
    if any((folder / name).exists() for name in _WEIGHTS_FILES if name != weights_file):
        raise InteropError(f"{folder} exists and holds an export in another --format: use a new folder")
    if not overwrite:
        raise InteropError(f"{folder} holds exported weights: use a new folder, or --overwrite to replace them")
