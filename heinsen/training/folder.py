"""A run's folder: its lock, and its config in config.json."""

import contextlib
import dataclasses
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from heinsen.config import ConfigError, differences, from_mapping, read_json_object
from heinsen.data.tokenizer import TOKENIZER_NAMES, is_tokenizer_name
from heinsen.distributed import first_reason
from heinsen.errors import HeinsenError, describe, print_warning
from heinsen.export import ExportError, is_export, read_manifest
from heinsen.files import LockedError, hold_lock, write_atomically
from heinsen.models import ModelConfig
from heinsen.training.config import TrainConfig, fixed_fields

CONFIG_FILE, LOCK_FILE = "config.json", "run.lock"
_OF_DATA = "tokenizer", "data_digest"  # what config.json has besides the config

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of flock, on a file system without locks

# Fields of a model that do not affect what its weights mean, with a value to compare models at.
_WEIGHT_INDEPENDENT = {
    "dtype": "float32",
    "remat": "none",
    "implementation": None,
    "document_token": None,
    "forget_gate_shortest": 2.0,
    "forget_gate_longest": 4096.0,
}


class RunError(HeinsenError, RuntimeError):
    """A run folder or a setting of a run that cannot be used."""


def load_run(workdir: Path) -> TrainConfig:
    """Return the config of the run in `workdir`, or of the run whose weights scripts/export.py wrote there.

    Raises RunError where there is none, or it is damaged.
    """
    return _load(workdir)[0]


def load_tokenizer_name(workdir: Path) -> str:
    """Return the name of the tokenizer whose tokens the model of a run or an export reads. Raises as `load_run`.

    `get_tokenizer(name, workdir)` is the tokenizer.
    """
    return _load(workdir)[1]


def _load(workdir: Path) -> tuple[TrainConfig, str]:
    try:
        if is_export(workdir):
            manifest = read_manifest(workdir)
            mapping: dict[str, Any] | None = {"tokenizer": manifest.tokenizer, **manifest.run}
        else:
            mapping = _read_config(workdir)
    except ExportError as error:
        raise RunError(str(error)) from error
    if mapping is None:
        raise RunError(
            f"{workdir} is not a run folder: it has no {CONFIG_FILE}; give the --workdir of a train.py run, or the "
            "--out of scripts/export.py"
        )
    try:
        return parse_config(mapping, f"{workdir / CONFIG_FILE}: config")
    except ConfigError as error:
        raise RunError(f"{error}. Restore the file, or use the version of heinsen that wrote it") from error


def parse_config(mapping: Mapping[str, Any], name: str = "config") -> tuple[TrainConfig, str]:
    """Return what config.json holds, the config and the name of the tokenizer. Raises ConfigError, as `name`."""
    config = from_mapping(TrainConfig, {key: value for key, value in mapping.items() if key not in _OF_DATA}, name)
    tokenizer = mapping.get("tokenizer")
    if not is_tokenizer_name(tokenizer):
        names = f"{', '.join(TOKENIZER_NAMES)}, file:DIGEST:ID"
        raise ConfigError(f"{name}.tokenizer = {tokenizer!r}: expected one of {names}")
    return config, str(tokenizer)


def _contents(config: TrainConfig, tokenizer: str, data_digest: str | None) -> dict[str, Any]:
    """Return what `parse_config` reads: the fields of the config, and the tokenizer and the digest of its data."""
    return {"tokenizer": tokenizer, "data_digest": data_digest, **dataclasses.asdict(config)}


def check_same_model(old: ModelConfig, new: ModelConfig, source: Path) -> None:
    """Raise RunError with the differences if the model in `source`, `old`, cannot share its weights with `new`."""
    comparable = lambda model: {"model": dataclasses.asdict(dataclasses.replace(model, **_WEIGHT_INDEPENDENT))}
    if lines := differences(comparable(old), comparable(new)):
        raise RunError(f"{source} holds the weights of another model:\n  " + "\n  ".join(lines))


def _read_config(workdir: Path) -> dict[str, Any] | None:
    """Return the contents of config.json, None if there is none. Raises RunError."""
    try:
        return read_json_object(workdir / CONFIG_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError as error:
        raise RunError(f"{error}: restore it, or give another folder") from error


@contextlib.contextmanager
def claim_folder(
    config: TrainConfig, workdir: Path, tokenizer: str, data_digest: str | None = None
) -> Iterator[list[str]]:
    """Hold a run folder, which one run at a time may write; create it, or check that the run in it has this config.

    All processes of a run call it together; the first one holds the lock. tokenizer, data_digest: of the run's
    data; the digest decides, not the path (None: unknown).

    Yields:
      A line for each field that differs and may; `write_config` then records the config.

    Raises:
      RunError: another process holds it, other fields differ, or the folder cannot be written.
    """
    changes = _find_changes(config, workdir, tokenizer, data_digest)  # a folder of something else is not even locked
    with contextlib.ExitStack() as stack:
        reason = None
        if jax.process_index() == 0:
            try:
                stack.enter_context(_lock(workdir))
                changes = _find_changes(config, workdir, tokenizer, data_digest)  # again, after the lock
            except RunError as error:
                reason = str(error)
        if (reason := first_reason(reason)) is not None:
            raise RunError(reason)
        yield changes


@contextlib.contextmanager
def _lock(workdir: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(workdir / LOCK_FILE))
        except LockedError as error:
            raise RunError(
                f"{workdir} belongs to a run in progress ({error}): wait for it or stop it, or give another --workdir. "
                f"If that machine is down, remove {workdir / LOCK_FILE}"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _unwritable(workdir, error) from error
            print_warning(f"{workdir} is on a file system without locks: make sure that no other process trains there")
        yield


def _find_changes(config: TrainConfig, workdir: Path, tokenizer: str, data_digest: str | None) -> list[str]:
    """Describe the fields that differ from those of the run in the folder, if there is one. Raises RunError."""
    if is_export(workdir):
        raise RunError(
            f"{workdir} holds exported weights: give a --workdir of its own, and --config.init_from={workdir} to start "
            "from them"
        )
    old, new = _read_config(workdir), _contents(config, tokenizer, data_digest)
    if old is None:
        return []
    before, now = fixed_fields(old), fixed_fields(new)
    known = before.pop("data_digest", None)
    del now["data_digest"]
    if None not in (known, data_digest) and isinstance(before.get("data"), dict):
        before["data"]["path"] = config.data.path  # the digests decide
    if lines := differences(before, now):
        raise RunError(
            f"{workdir} holds a run with another config:\n  " + "\n  ".join(lines) + "\n"
            "Give another --workdir, or the run's own config to resume it."
        )
    if None not in (known, data_digest) and known != data_digest:
        raise RunError(
            f"{workdir} holds a run on other data: what lies at {config.data.path} now is not what it has read (digest "
            f"{data_digest} instead of {known}). Give the path of its own data, or another --workdir."
        )
    return differences(old, new)


def write_config(config: TrainConfig, workdir: Path, tokenizer: str, data_digest: str | None = None) -> None:
    """Write config.json, creating the folder if needed. Raises RunError."""
    path = workdir / CONFIG_FILE
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_contents(config, tokenizer, data_digest), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(workdir, error) from error


def _unwritable(workdir: Path, error: OSError) -> RunError:
    return RunError(f"{workdir} cannot be written: {describe(error)}. Give another --workdir, or free some space there")
