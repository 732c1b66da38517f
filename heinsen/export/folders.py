"""Folders of exported weights.

    DIR/weights.safetensors   the parameters
    DIR/config.json           `Manifest`: model, tokenizer's name, run, the size and SHA-256 of the weights, its digest
    DIR/README.md             a model card
    DIR/tokenizer.json        of a tokenizer that is a file ("huggingface": heinsen_tokenizer.json)

Layouts: the paper's model is written as "reference", the published module's state_dict: any tool that reads
safetensors gets what `load_state_dict` takes. Other models are "native", under the paths of our own parameters. On
demand a folder is "huggingface", with the other names and files that `heinsen.export.huggingface` describes. Since a
safetensors file has no checksum, the manifest holds one, and a digest of its own fields (`heinsen.files.seal`). Where
transformers has written the weights anew, there is no checksum of them.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heinsen.config import ConfigError, from_mapping
from heinsen.data.tokenizer import EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE, get_tokenizer
from heinsen.errors import describe
from heinsen.export import huggingface
from heinsen.export.huggingface import huggingface_tensors
from heinsen.export.published import is_reference_model, reference_tensors
from heinsen.export.state_dicts import ExportError, Tensor, from_state_dict, own_tensors, to_state_dict
from heinsen.files import atomic_folder, file_sha256, seal, unseal
from heinsen.models import ModelConfig, Params

FORMAT, FORMAT_VERSION = "heinsen export", 1
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
DTYPES = ("float32", "bfloat16")

_HOW = "write one with `python scripts/export.py --workdir=RUN --out=DIR`"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The file of weights, and the names of its tensors."""

    weights_file: str
    tensors: Callable[[ModelConfig], list[Tensor]]


LAYOUTS = {
    "reference": Layout("weights.safetensors", reference_tensors),
    "native": Layout("weights.safetensors", own_tensors),
    "huggingface": Layout("model.safetensors", huggingface_tensors),
}
_WEIGHTS_FILES = {layout.weights_file for layout in LAYOUTS.values()}


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """Size and checksum of the file of weights."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of an exported folder's config.json; in the layout "huggingface", of its field "heinsen".

    layout is one of LAYOUTS; step and run are the training step and config of the run that was exported.
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
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout = {self.layout!r}: expected {', '.join(LAYOUTS)}")


# ---- reading -------------------------------------------------------------------------------------


def is_export(folder: Path) -> bool:
    """Return whether `save_folder` wrote this folder, be it whole or damaged."""
    return any((folder / name).is_file() for name in _WEIGHTS_FILES) or _holds_manifest(folder)


def _holds_manifest(folder: Path) -> bool:
    try:
        return _is_manifest(_read_json(folder)[0])
    except (OSError, ValueError, RecursionError):
        return False


def _read_json(folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """Return the record in a folder's config.json, and transformers' fields if it has written the folder since."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    if isinstance(config, dict) and config.get("model_type") == huggingface.RECORD:
        return config.get(huggingface.RECORD), config if "transformers_version" in config else None
    return config, None


def _is_manifest(record: Any) -> bool:
    """Return whether the contents of a config.json are an exported folder's rather than a run's."""
    return isinstance(record, dict) and record.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read an exported folder's config.json. Raises ExportError if it is missing, damaged, or of another version."""
    return _read_manifest(folder)[0]


def _read_manifest(folder: Path) -> tuple[Manifest, bool]:
    """Return the manifest, and whether transformers has written the folder since. Raises ExportError."""
    path = folder / CONFIG_FILE
    try:
        record, rewritten = _read_json(folder)
        is_other = isinstance(record, dict) and not (_is_manifest(record) or "digest" in record)
        mapping = record if is_other else unseal(record)
    except FileNotFoundError as error:
        raise ExportError(f"{folder} holds no exported weights: it has no {CONFIG_FILE}; {_HOW}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} is damaged ({describe(error)}): copy the folder again, or {_HOW}") from error
    if not _is_manifest(mapping):
        raise ExportError(f"{folder} holds no exported weights: its {CONFIG_FILE} belongs to something else; {_HOW}")
    if mapping.get("format_version") != FORMAT_VERSION:
        raise ExportError(
            f"{path} has format version {mapping.get('format_version')}, this code reads {FORMAT_VERSION}: use the "
            "version of heinsen that wrote it"
        )
    if rewritten is not None and isinstance(n_rows := rewritten.get("vocab_size"), int):
        # As resize_token_embeddings may have left the embedding.
        for model in (mapping["model"], mapping["run"].get("model", {})):
            model |= {"padded_vocab_size": n_rows, "vocab_size": min(model.get("vocab_size", n_rows), n_rows)}
    try:
        return from_mapping(Manifest, mapping, str(path)), rewritten is not None
    except ConfigError as error:
        raise ExportError(str(error)) from error


def load_folder(folder: Path) -> tuple[ModelConfig, str, Params]:
    """Load a folder that `save_folder` wrote, or transformers' save_pretrained from one of layout "huggingface".

    Returns:
      The model's config, the tokenizer's name, and the parameters as NumPy arrays of the dtype on disk.

    Raises:
      ExportError: the folder is missing, its weights are damaged in any bit, or they do not fit its config. (What
        transformers wrote has no checksum.)
    """
    manifest, is_rewritten = _read_manifest(folder)
    layout = LAYOUTS[manifest.layout]
    path, again = folder / layout.weights_file, f"copy the folder again, or {_HOW}"
    if Path(f"{path}.index.json").exists():
        again = "save it with transformers as one file: save_pretrained(DIR, max_shard_size='1TB')"
    try:
        size = path.stat().st_size
        if not is_rewritten and size != manifest.weights.bytes:
            raise ExportError(f"{path} has {size} bytes instead of {manifest.weights.bytes}: {again}")
        if not is_rewritten and file_sha256(path) != manifest.weights.sha256:
            raise ExportError(f"{path} is damaged, its SHA-256 is not the one in {CONFIG_FILE}: {again}")
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path} cannot be read ({describe(error)}): {again}") from error
    try:
        params = from_state_dict(manifest.model, layout.tensors(manifest.model), arrays)
        return manifest.model, manifest.tokenizer, params
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from error


# ---- writing -------------------------------------------------------------------------------------


def save_folder(
    folder: Path,
    config: ModelConfig,
    tokenizer: str,
    params: Params,
    *,
    step: int,
    run: Mapping[str, Any],
    card: str,
    tokenizer_file: bytes | None = None,
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
      tokenizer_file: content of the tokenizer's file, if it is a file.
      dtype: of the numbers on disk, one of DTYPES; rounded to nearest.
      for_transformers: whether to write the layout "huggingface".
      overwrite: replace the weights of an earlier export of the same files. No other folder that holds anything is ever
        written to.

    Raises:
      ExportError: something is in the way, the parameters do not fit the config, or the folder cannot be written.
        Nothing has changed then.
      TokenizerFilesError: the tokenizer's files, which transformers needs, are nowhere.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype = {dtype!r}: choose {' or '.join(DTYPES)}")
    name = "huggingface" if for_transformers else "reference" if is_reference_model(config) else "native"
    layout = LAYOUTS[name]
    state_dict = to_state_dict(config, layout.tensors(config), params)
    tensors = {name: x.astype(jnp.dtype(dtype), copy=False) for name, x in state_dict.items()}
    _check_free(folder, layout.weights_file, overwrite)
    others = [*huggingface.CODE_FILES, *huggingface.JSON_FILES] if for_transformers else []
    if tokenizer_file is not None:
        others.append(EXPORTED_TOKENIZER_FILE if for_transformers else TOKENIZER_FILE)
    try:
        with atomic_folder(folder, (*others, layout.weights_file, CARD_FILE, CONFIG_FILE)) as temporary:
            (temporary / CARD_FILE).write_text(card)
            if tokenizer_file is not None:
                (temporary / others[-1]).write_bytes(tokenizer_file)
            path = temporary / layout.weights_file
            save_file(tensors, path, {"format": "pt"} if for_transformers else None)
            shutil.copymode(temporary / CARD_FILE, path)  # safetensors makes it private
            weights = WeightsFile(path.stat().st_size, file_sha256(path))
            manifest = Manifest(FORMAT, FORMAT_VERSION, name, dtype, config, tokenizer, step, weights, dict(run))
            record = seal(dataclasses.asdict(manifest))
            if for_transformers:
                own = get_tokenizer(tokenizer, temporary)
                huggingface.write_files(temporary, config, own)
                record = huggingface.transformers_config(record, config, own, dtype)
            (temporary / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{folder} cannot be written: {describe(error)}. Use another folder, or free some space"
        ) from error
    return manifest


def _check_free(folder: Path, weights_file: str, overwrite: bool) -> None:
    """Raise ExportError unless the folder is new, empty, or an export of these files that may be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _holds_manifest(folder):
        raise ExportError(f"{folder} exists and holds something else: use a new folder")
    if any((folder / name).exists() for name in _WEIGHTS_FILES - {weights_file}):
        raise ExportError(f"{folder} exists and holds an export in another --format: use a new folder")
    if not overwrite:
        raise ExportError(f"{folder} holds exported weights: use a new folder, or --overwrite to replace them")
