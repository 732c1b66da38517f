"""Prefixes on disk: one file (.npz) with arrays, and a header that says which model they belong to."""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.decoding.prompts import Prefix
from heinsen.errors import HeinsenError
from heinsen.files import atomic_writer
from heinsen.models import ModelConfig, Params, init_model_state, trim_caches

STATE_VERSION = 1


class StateError(HeinsenError, ValueError):
    """A saved state that cannot be used here."""


def save_prefix(path: Path, config: ModelConfig, params: Params, prefix: Prefix) -> None:
    """Write a prefix to one file, atomically. Raises OSError.

    The file holds the logits, the state with caches trimmed to what is used, and the model they belong to: all fields
    of its config that change what a state means, and a digest of `params` (from `init_params`).
    """
    logits, state = jax.tree.map(np.asarray, prefix)
    prefix = Prefix(logits, trim_caches(config, state, int(state.n_tokens.max())))
    arrays: dict[str, Any] = {f"array_{i}": _as_bits(x) for i, x in enumerate(jax.tree.leaves(prefix))}
    header = {
        "version": STATE_VERSION,
        "rows": len(prefix.logits),
        "model": _identity(config),
        "params": digest(params),
    }
    with atomic_writer(path) as file:
        np.savez(file, header=np.array(json.dumps(header)), **arrays)


def load_prefix(path: Path, config: ModelConfig, params: Params) -> Prefix:
    """Read what `save_prefix` wrote. Raises StateError for a missing or damaged file, or a state of another model."""
    header, arrays = _read_file(path)
    own = _identity(config)
    if differing := [name for name in own if header["model"].get(name) != own[name]]:
        listed = "; ".join(f"model.{n} {header['model'].get(n)!r} there, {own[n]!r} here" for n in differing)
        raise StateError(f"{path} is a state of another model: {listed}")
    if header["params"] != digest(params):
        raise StateError(
            f"{path} is a state of a model of this shape with other parameters: use the run it was made by"
        )
    empty = jax.eval_shape(lambda: init_model_state(config, header["rows"]))
    logits = jax.ShapeDtypeStruct((), empty.position.dtype)
    leaves, structure = jax.tree.flatten((logits, empty))
    loaded = [jnp.asarray(x.view(leaf.dtype)) for x, leaf in zip(arrays, leaves, strict=True)]
    return Prefix(*jax.tree.unflatten(structure, loaded))


def _read_file(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header and the arrays. Raises StateError."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["version"] != STATE_VERSION:
                raise StateError(
                    f"{path} has version {header['version']} of the state format, this program reads {STATE_VERSION}: "
                    "read the text again"
                )
            return header, [file[f"array_{i}"] for i in range(len(file.files) - 1)]
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist: save a state there first (--save_state)") from error
    except StateError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(f"{path} is no saved state, or a damaged one ({error}): read the text again") from error


def digest(params: Params) -> str:
    """Return a hash of all parameters' names and values."""
    whole = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        whole.update(jax.tree_util.keystr(path).encode())
        whole.update(np.ascontiguousarray(x).data if x.dtype == np.float32 else np.asarray(x).tobytes())
    return whole.hexdigest()[:32]


def _as_bits(x: np.ndarray) -> np.ndarray:
    """View bfloat16, which .npz files do not know, as integers."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def _identity(config: ModelConfig) -> dict[str, Any]:
    """Return the config's fields that make a state what it is."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in ("remat", "implementation")}
