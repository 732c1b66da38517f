"""Folders that hold a model as one decoding step in ONNX.

DIR/model.onnx          the step, with all weights (`heinsen.contrib.onnx.step`); its metadata are those of model.json
DIR/model.json          config, tokenizer, step, and the names, shapes and dtypes of the state, which begins as zeros
DIR/state.safetensors   with a saved state: its tensors, and the logits of the next token
DIR/tokenizer.json      of a tokenizer that is a file: what it encodes, without what it adds to a text
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from heinsen.contrib.onnx.state import state_dtype, state_shapes, to_step_state
from heinsen.data.tokenizer import TOKENIZER_FILE, Tokenizer, without_additions
from heinsen.decoding import Prefix
from heinsen.errors import describe
from heinsen.export import ExportError
from heinsen.files import atomic_folder
from heinsen.models import ModelConfig, Params, count_params

FORMAT = "heinsen onnx step"
MODEL_FILE, RECORD_FILE, STATE_FILE = "model.onnx", "model.json", "state.safetensors"

_MOST_PARAMETERS = (2**31 - 2**24) // 4  # protobuf's limit of 2 GiB, with room for the graph


def check_exportable(config: ModelConfig) -> None:
    """Raise ExportError for a model that has no such step, and where the package onnx is missing."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ExportError(f"--format=onnx needs a package ({error}): pip install 'onnx>=1.17'") from error
    wanted = {"objective": "next_token", "attention": "heinsen", "feature_map": "none"}
    is_wanted = {
        "objective": config.causal,
        "attention": all(x.is_exportable for x in config.mixers),
        "feature_map": config.n_features is None,
    }
    for field, value in wanted.items():
        if not is_wanted[field]:
            raise ExportError(
                f"model.{field} = {getattr(config, field)!r}: one step in ONNX needs {value}; export it without "
                f"--format=onnx, or train a model with {field} = {value}"
            )


def save_step(
    folder: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    params: Params,
    *,
    step: int,
    prefix: Prefix | None = None,
    overwrite: bool = False,
) -> int:
    """Write the folder, whole or not at all, and return the size of model.onnx in bytes.

    Args:
      step: training step of the parameters.
      prefix: what was read before, for state.safetensors: float32 [1, ...], and int32 `place`.
      overwrite: replace the files of an earlier export.

    Raises ExportError for a model that cannot be expressed, parameters of 2 GiB, and a folder that holds something else
    or cannot be written.
    """
    check_exportable(config)
    if (n_params := count_params(params)) > _MOST_PARAMETERS:
        raise ExportError(
            f"{n_params:,} parameters in float32 exceed the 2 GiB of an ONNX file: export without --format=onnx"
        )
    _check_free(folder, overwrite)
    from heinsen.contrib.onnx.step import build_step  # imports onnx

    model = dataclasses.asdict(config)
    metadata = {"config": json.dumps(model), "tokenizer": tokenizer.name, "step": str(step)}
    files = {MODEL_FILE: build_step(config, params, metadata).SerializeToString()}
    if prefix is not None:
        logits = np.array(prefix.logits, np.float32)[:, : config.vocab_size].copy()
        files[STATE_FILE] = save({"logits": logits} | to_step_state(config, prefix.state))
    state = {name: {"shape": shape, "dtype": state_dtype(name)} for name, shape in state_shapes(config).items()}
    of_text = {"tokenizer": tokenizer.name, "end_of_text": tokenizer.eot_id}
    record = {"format": FORMAT, "format_version": 1, "step": step, **of_text, "config": model, "state": state}
    if tokenizer.content is not None:
        files[TOKENIZER_FILE] = json.dumps(without_additions(tokenizer.content)).encode()
    files[RECORD_FILE] = (json.dumps(record, indent=1) + "\n").encode()
    try:
        with atomic_folder(folder, list(files)) as temporary:
            for name, data in files.items():
                (temporary / name).write_bytes(data)
        if prefix is None:  # that of an earlier export belongs to another model
            (folder / STATE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {describe(error)}. Use another folder") from error
    return len(files[MODEL_FILE])


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raise ExportError unless the folder is new, empty, or an earlier export that may be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        is_ours = json.loads((folder / RECORD_FILE).read_bytes())["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise ExportError(f"{folder} exists and holds something else: use a new folder")
    if not overwrite:
        raise ExportError(f"{folder} holds an exported step: use a new folder, or --overwrite to replace it")
