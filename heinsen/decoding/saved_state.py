"""Prefixes on disk: one file (.npz) with arrays, and a header that says which model they belong to.

The header also holds a digest of itself and of the arrays.
"""

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.decoding.prompts import Prefix
from heinsen.errors import HeinsenError
from heinsen.files import atomic_writer
from heinsen.models import ModelConfig, Params, init_model_state
from heinsen.models.state import resize_caches

STATE_VERSION = 2


class StateError(HeinsenError, ValueError):
    """A saved state that cannot be used here."""


def save_prefix(path: Path, config: ModelConfig, params: Params | str, prefix: Prefix) -> None:
    """Write a prefix to one file, atomically. Raises OSError.

    The file holds the logits, the state with caches trimmed to what is used, and the model they belong to: all fields
    of its config that change what a state means, and a hash of `params` (from `init_params`, or their `hash_params`).
    """
    used = resize_caches(config, prefix.state, int(np.max(prefix.state.n_tokens)))
    arrays = [np.asarray(x) for x in jax.tree.leaves(Prefix(prefix.logits, used))]
    arrays = [x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for x in arrays]  # .npz files do not know bfloat16
    header = {
        "version": STATE_VERSION,
        "model": _state_fields(config),
        "params": params if isinstance(params, str) else hash_params(params),
    }
    header["digest"] = _digest_contents(header, arrays)
    with atomic_writer(path) as file:
        named: dict[str, Any] = {f"array_{i}": x for i, x in enumerate(arrays)}
        np.savez(file, header=np.array(json.dumps(header)), **named)


def load_prefix(path: Path, config: ModelConfig, params: Params | str) -> Prefix:
    """Read what `save_prefix` wrote. Raises StateError for a missing or damaged file, or a state of another model."""
    try:
        header, arrays = _read_file(path)
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist: save a state there first (--save_state)") from error
    except PermissionError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    except StateError:
        raise
    except Exception as error:  # NumPy, zipfile and json raise errors of many types for bytes that are not theirs
        why = f" ({error})" if zipfile.is_zipfile(path) else ""  # else NumPy takes it for a pickle
        raise StateError(f"{path} is no saved state, or a damaged one{why}: read the text again") from error
    saved, own = header["model"], _state_fields(config)
    saved = {name: getattr(ModelConfig, name, None) for name in own} | saved  # earlier states lack later fields
    if differing := [name for name in own if saved[name] != own[name]]:
        listed = "; ".join(f"model.{n} {saved[n]!r} there, {own[n]!r} here" for n in differing)
        raise StateError(f"{path} is a state of another model: {listed}")
    if header["params"] != (params if isinstance(params, str) else hash_params(params)):
        raise StateError(
            f"{path} is a state of a model of this shape with other parameters: use the run it was made by"
        )

    def empty() -> Prefix:
        state = init_model_state(config, 1)
        return Prefix(jnp.zeros((1, config.padded_vocab_size), state.position.dtype), state)

    leaves, structure = jax.tree.flatten(jax.eval_shape(empty))
    loaded = [jnp.asarray(x.view(leaf.dtype)) for x, leaf in zip(arrays, leaves, strict=True)]
    prefix: Prefix = jax.tree.unflatten(structure, loaded)
    return prefix


def _read_file(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header and the arrays. Raises StateError for another version, and anything for damage."""
    with open(path, "rb") as opened:
        file = np.load(opened, allow_pickle=False)
        if not isinstance(file, Mapping):
            raise ValueError("a single array")
        header = json.loads(str(file["header"]))
        version = header["version"]
        if type(version) is int and version != STATE_VERSION:
            raise StateError(
                f"{path} has version {version} of the state format, this program reads {STATE_VERSION}: read the text "
                "again"
            )
        arrays = [file[f"array_{i}"] for i in range(len(file) - 1)]
        if header.pop("digest", None) != _digest_contents(header, arrays):
            raise ValueError("its digest is that of other contents")
        return header, arrays


def _digest_contents(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> str:
    """Return a hash of a header without its digest, and of the arrays."""
    whole = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for x in arrays:
        whole.update(f"{x.dtype.str} {x.shape}".encode())
        whole.update(np.ascontiguousarray(x).data)
    return whole.hexdigest()[:32]


def hash_params(params: Params) -> str:
    """Return a hash of all parameters' names and values."""
    whole = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        whole.update(jax.tree_util.keystr(path).encode())
        whole.update(np.ascontiguousarray(x).data if x.dtype == np.float32 else np.asarray(x).tobytes())
    return whole.hexdigest()[:32]


def _state_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config's fields that make a state what it is."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in ("remat", "implementation")}
