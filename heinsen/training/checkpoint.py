"""Checkpoints of a run: its state and the data's position, together, atomically, and checked. The only Orbax import.

    WORKDIR/checkpoints/<step>/            one folder a checkpoint: the newest `keep`, and every `keep_every` steps
    WORKDIR/damaged_checkpoints/<step>/    put aside when a run went on from an older one

Orbax loads flipped bits without a word. So each checkpoint holds a record of what it should give back: step, position,
hash of the config, and of each array its type and a checksum; and a hash of the record itself. A checkpoint that does
not give back what its record says is damaged: the one before it is used.
"""

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from heinsen.errors import HeinsenError

CHECKPOINTS, DAMAGED = "checkpoints", "damaged_checkpoints"


class CheckpointError(HeinsenError, RuntimeError):
    """No usable checkpoint where one is needed, or one that cannot be saved."""


class Restored(NamedTuple):
    step: int
    state: Any
    position: dict[str, Any]  # of the data iterator


def _print_warning(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Checkpoints:
    """The checkpoints of one run, saved asynchronously; use as a context manager to wait for the last save.

    With several processes each must call every method, with a `workdir` that all of them see.

    Args:
      keep: so many of the newest checkpoints stay.
      keep_every: besides these, all whose step it divides; None for no others.
      warn: called, in the first process, with what is passed over.
    """

    def __init__(
        self, workdir: Path, keep: int, keep_every: int | None = None, warn: Callable[[str], None] = _print_warning
    ):
        self.directory = (workdir / CHECKPOINTS).absolute()
        policies = ocp.training.preservation_policies
        every = [] if keep_every is None else [policies.EveryNSteps(keep_every)]
        self._policy = policies.AnyPreservationPolicy([policies.LatestN(keep), *every])
        self._warn = warn
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._saving: tuple[int, Any] | None = None  # step, and Orbax's handle
        self._quiet = _quiet_orbax(logging.ERROR)

    def __enter__(self) -> "Checkpoints":
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        try:
            self._close()
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(str(failed))  # `error` is what ends the run
        finally:
            self._quiet.__exit__(None, None, None)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, one that is being saved included."""
        newest = self._open().latest
        return None if newest is None else newest.step

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def wait(self) -> None:
        """Return when the save under way is whole on disk. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        try:
            response.result()
        except Exception as error:  # Orbax raises many kinds
            with contextlib.suppress(Exception):
                self._checkpointer.wait()  # Orbax reports it once more
            raise self._not_saved(step, error) from error

    def save(self, step: int, state: Any, position: dict[str, Any], config_hash: str) -> None:
        """Begin saving, unless that step is there; `state` may be donated as soon as this returns.

        Args:
          state: a NamedTuple of pytrees of arrays; each field can be restored alone.
          position: of the data iterator, as JSON.
          config_hash: what `restore_newest` will be given.

        Raises:
          CheckpointError: this save or the one before it failed. Older checkpoints are whole.
        """
        self.wait()
        if self.latest == step:
            return
        fields = _with_arrays(state._asdict())
        record = {"step": step, "position": position, "config_hash": config_hash, "arrays": _describe(fields)}
        metadata = {"record": record, "sha256": _hash(record)}
        try:
            response = self._open().save_checkpointables_async(step, fields, force=True, custom_metadata=metadata)
        except Exception as error:
            raise self._not_saved(step, error) from error
        self._saving = step, response

    def restore_newest(self, abstract: Any, config_hash: str) -> Restored | None:
        """The newest checkpoint that is whole, placed as `abstract` says; None if there has been no save yet.

        Damaged checkpoints newer than it are put aside and named in a warning.

        Raises:
          CheckpointError: there are only damaged ones, or one of another config or model. Nothing is changed then.
        """
        self._close()
        found, damaged = _find_newest(self.directory, _with_arrays(abstract._asdict()), config_hash)
        if found is None:
            self._open()
            return None
        step, record, fields = found
        self._put_aside(damaged, step)
        self._open()
        return Restored(step, abstract._replace(**fields), record["position"])

    def _open(self) -> ocp.training.Checkpointer:
        """Orbax's view of the folder, from now on."""
        if self._checkpointer is None:
            try:
                self._checkpointer = ocp.training.Checkpointer(
                    self.directory, preservation_policy=self._policy, cleanup_tmp_directories=True
                )
            except Exception as error:  # the folder, or a checkpoint older than the one restored
                raise CheckpointError(f"{self.directory} cannot be opened: {_reason(error)}") from error
        return self._checkpointer

    def _close(self) -> None:
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def _put_aside(self, damaged: dict[int, str], used: int) -> None:
        reason = None
        if jax.process_index() == 0:
            try:
                for step, why in damaged.items():
                    target = _free_path(self.directory.parent / DAMAGED / str(step))
                    target.parent.mkdir(exist_ok=True)
                    os.rename(self.path(step), target)
                    self._warn(f"{self.path(step)} is damaged: {why}. Using step {used}; it is now {target}")
            except OSError as error:
                reason = _reason(error)
        if (reason := _shared(reason)) is not None:
            raise CheckpointError(f"damaged checkpoints in {self.directory} cannot be moved away: {reason}")

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        older = [whole for whole in _steps(self.directory) if whole != step]
        then = f"goes on from checkpoint {older[-1]}" if older else "starts from the beginning: there is no checkpoint"
        return CheckpointError(
            f"step {step} could not be saved to {self.path(step)}: {_reason(error)}. When that is mended, the same "
            f"command {then}"
        )


def has_checkpoints(workdir: Path) -> bool:
    """Whether `restore_newest` would find any, whole or damaged. Raises CheckpointError."""
    return bool(_steps(workdir / CHECKPOINTS))


def restore_params(
    workdir: Path, abstract_params: Any, warn: Callable[[str], None] = _print_warning
) -> tuple[int, Any]:
    """(step, parameters) of the newest checkpoint of a run whose parameters are whole; nothing is written.

    Raises CheckpointError if there is none; `warn` names those passed over.
    """
    directory = (workdir / CHECKPOINTS).absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{workdir} has no {CHECKPOINTS}/ folder: is it the --workdir of a run of train.py?")
    found, damaged = _find_newest(directory, {"params": abstract_params})
    if found is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint: let train.py reach one (checkpoint_every)")
    step, _, fields = found
    if jax.process_index() == 0:
        for newer, why in damaged.items():
            warn(f"{directory / str(newer)} is damaged: {why}. Using step {step}")
    return step, fields["params"]


# ---- checksums -------------------------------------------------------------------------------


@jax.jit
def checksums(tree: Any) -> list[jax.Array]:
    """A uint32 of each array, of its words and their places; the same however it lies on how many devices.

    A changed word is always noticed; any other change but for one in 2^32.
    """
    return [_checksum(x) for x in jax.tree.leaves(tree)]


def _checksum(x: jax.Array) -> jax.Array:
    """Σ_i mix(w_i + i·odd) mod 2^32 over the words w_i: one pass, no gather, and sums of integers know no order.

    `mix` is a bijection. Without it (Σ w_i·odd_i) flipping the highest bit of any two words would go unnoticed.
    """
    words = _words(x)
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words + index * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits as uint32: narrower types widened, 64 bits as two words on a last axis, keys and complex by parts."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize <= 4 and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)):
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


# ---- the record ------------------------------------------------------------------------------


def _types(tree: Any) -> dict[str, str]:
    """{name of an array: its dtype and shape}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _describe(fields: dict[str, Any]) -> dict[str, list[str]]:
    """{name of an array: [type, checksum]}."""
    sums = jax.device_get(checksums(fields))
    return {name: [kind, f"{x:08x}"] for (name, kind), x in zip(_types(fields).items(), sums, strict=True)}


def _with_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    """Orbax saves no empty trees."""
    return {name: tree for name, tree in fields.items() if jax.tree.leaves(tree)}


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class _Damaged(Exception):
    """What is wrong with a checkpoint."""


def _read_record(path: Path, step: int, field: str) -> dict[str, Any]:
    metadata = ocp.metadata(path, field).custom_metadata or {}
    if metadata.keys() != {"record", "sha256"}:
        raise _Damaged("it has no record of its arrays (or an older version of the code saved it)")
    record = metadata["record"]
    if _hash(record) != metadata["sha256"]:
        raise _Damaged("its record does not have its own hash")
    if record["step"] != step:
        raise _Damaged(f"it was saved as step {record['step']}")
    return record


def _differences(recorded: dict[str, list[str]], wanted: dict[str, Any]) -> list[str]:
    """Arrays among the fields `wanted` that the checkpoint has otherwise."""
    here = _types(wanted)
    there = {name: kind for name, (kind, _) in recorded.items() if name.split("/")[0] in wanted}
    return [
        f"{name} is {there.get(name, 'missing')} in it, {here.get(name, 'missing')} in the model"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


# ---- finding a whole one ---------------------------------------------------------------------


def _steps(directory: Path) -> list[int]:
    """Steps of the checkpoints, whole or damaged, in order; saves under way or killed have longer names."""
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder: move it away")
    return sorted(int(path.name) for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))


def _find_newest(
    directory: Path, wanted: dict[str, Any], config_hash: str | None = None
) -> tuple[tuple[int, dict[str, Any], dict[str, Any]] | None, dict[int, str]]:
    """((step, record, fields) of the newest whole checkpoint, None if there are none; {newer step: its damage}).

    Every process comes to the same answer: what one of them cannot read is damaged for all, and the rest follows from
    the record and from checksums over all devices. Raises CheckpointError.
    """
    damaged = {}
    for step in reversed(_steps(directory)):
        path = directory / str(step)
        record, reason = _attempt(lambda: _read_record(path, step, next(iter(wanted))))  # noqa: B023
        if reason is None:
            _check_origin(path, record, wanted, config_hash)
            fields, reason = _attempt(lambda: _load(path, wanted))  # noqa: B023
        if reason is None:
            changed = [name for name, x in _describe(fields).items() if record["arrays"][name] != x]
            if not changed:
                return (step, record, fields), damaged
            fields, reason = None, f"{len(changed)} arrays are not as they were saved: {_few(changed)}"
        damaged[step] = reason
    if not damaged:
        return None, damaged
    raise CheckpointError(
        f"{directory} holds no usable checkpoint:\n"
        + "".join(f"  {directory / str(step)} cannot be restored: {why}\n" for step, why in damaged.items())
        + "Put a copy of one of them in its place, or move the folder away to start from the beginning."
    )


def _check_origin(path: Path, record: dict[str, Any], wanted: dict[str, Any], config_hash: str | None) -> None:
    """Whole, but another run's: an older one would be too."""
    if config_hash not in (None, record["config_hash"]):
        raise CheckpointError(
            f"{path} was saved by a run with another config (hash {record['config_hash']}, here {config_hash}): "
            "give another --workdir, or the config it was saved with"
        )
    if differences := _differences(record["arrays"], wanted):
        raise CheckpointError(
            f"{path} cannot be restored: it belongs to another model. {_few(differences)}. Give another --workdir, or "
            "the config it was saved with"
        )


def _load(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Each process reads on its own: where one fails, the others do not wait for it."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )
    with ocp.Context(multiprocessing_options=alone if jax.process_count() > 1 else None):
        return ocp.load_checkpointables(path, wanted)


def _attempt(read: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, reason) if `read` failed in any process."""
    result, reason = None, None
    with _quiet_orbax(logging.DEBUG), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        try:
            result = read()
        except Exception as error:  # Orbax raises many kinds
            reason = _reason(error)
        if reason is not None:
            _ignore_abandoned_reads()
            gc.collect()
    reason = _shared(reason)
    return (result, None) if reason is None else (None, reason)


def _shared(reason: str | None) -> str | None:
    """The reason of the first process that has one; each must ask."""
    if jax.process_count() == 1:
        return reason
    text = np.zeros(1024, np.uint8)
    encoded = np.frombuffer((reason or "").encode()[: len(text)], np.uint8)
    text[: len(encoded)] = encoded
    texts = [bytes(row[row > 0]).decode(errors="replace") for row in multihost_utils.process_allgather(text)]
    return next(filter(None, texts), None)


# ---- messages --------------------------------------------------------------------------------


def _few(items: list[str]) -> str:
    return "; ".join(items[:3]) + (f"; and {len(items) - 3} more" if len(items) > 3 else "")


def _reason(error: BaseException) -> str:
    """The system's error where there is one, else the innermost cause, which Orbax's own errors hide."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:
            return f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(link)):
            return os.strerror(int(number[1]))
    text = " ".join(str(chain[-1]).split())
    return re.sub(r" \[tensorstore_spec.*", "", text) or type(chain[-1]).__name__


@contextlib.contextmanager
def _quiet_orbax(level: int) -> Iterator[None]:
    """Keep Orbax from reporting, once in every thread and task it passes, what also comes as an exception."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio", None)]
    of_orbax = lambda record: record.name == "asyncio" or "orbax" in record.pathname
    keep = lambda record: record.levelno < level or not of_orbax(record)
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _ignore_abandoned_reads() -> None:
    """Where one read fails Orbax leaves the others behind: they may end at any time from now on, with a complaint."""
    if getattr(sys.unraisablehook, "func", None) is not _report_others:
        sys.unraisablehook = functools.partial(_report_others, sys.unraisablehook)


def _report_others(report: Callable[[Any], Any], unraisable: Any) -> None:
    code = getattr(unraisable.object, "cr_code", None)
    if "Event loop is closed" not in str(unraisable.exc_value) and (code is None or "orbax" not in code.co_filename):
        report(unraisable)


def _free_path(path: Path) -> Path:
    """`path`, or with the first suffix that is not taken."""
    taken = 0
    while (free := path.with_name(f"{path.name}.{taken}") if taken else path).exists():
        taken += 1
    return free
