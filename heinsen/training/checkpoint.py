"""Checkpoints of a run: its state and its progress, together, atomic, with checksums. The only Orbax import.

    WORKDIR/checkpoints/<step>/            a folder per checkpoint: the newest `keep`, and every `keep_every` steps
    WORKDIR/damaged_checkpoints/<step>/    moved here when a run resumed from an older one

Orbax does not detect flipped bits. So each checkpoint holds a record of its contents: step, position, hash of the
config, type and checksum of each array, and a hash of the record itself. A checkpoint that does not match its record is
damaged, and the one before it is used.
"""

import contextlib
import functools
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from heinsen.distributed import first_reason
from heinsen.errors import HeinsenError, print_warning
from heinsen.files import seal, unseal
from heinsen.models import Params
from heinsen.training.devices import is_device_error
from heinsen.training.step import TrainState

CHECKPOINTS, DAMAGED = "checkpoints", "damaged_checkpoints"


class CheckpointError(HeinsenError, RuntimeError):
    """A checkpoint that is missing, damaged, of another run, or cannot be saved."""


class Checkpoint(NamedTuple):
    """A checkpoint's contents."""

    step: int
    state: TrainState
    progress: dict[str, Any]  # as it was saved


class Checkpoints:
    """The checkpoints of one run, saved asynchronously; use as a context manager to wait for the last save.

    With several processes each must call every method, with a `workdir` that all of them see.

    Args:
      keep: how many of the newest checkpoints to keep.
      keep_every: keep those whose step it divides as well; None: no others.
      warn: called in the first process with a message for each damaged checkpoint.
    """

    def __init__(
        self, workdir: Path, keep: int, keep_every: int | None = None, warn: Callable[[str], object] = print_warning
    ) -> None:
        self.directory = (workdir / CHECKPOINTS).absolute()
        policies = ocp.training.preservation_policies
        every = [] if keep_every is None else [policies.EveryNSteps(keep_every)]
        self._policy = policies.AnyPreservationPolicy([policies.LatestN(keep), *every])
        self._warn = warn
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._saving: tuple[int, Any] | None = None  # step, and Orbax's handle
        _quiet_orbax()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            if not (is_device_error(error) and jax.process_count() > 1):  # a save waits for all processes
                self._close()
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(str(failed))  # `error` ends the run

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, which may still be being saved."""
        newest = self._open().latest
        return None if newest is None else newest.step

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def wait(self) -> None:
        """Wait until the pending save is whole on disk. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        try:
            response.result()
        except Exception as error:  # Orbax raises many kinds
            with contextlib.suppress(Exception):
                self._open().wait()  # Orbax raises it a second time
            raise self._not_saved(step, error) from error

    def save(self, step: int, state: TrainState, progress: dict[str, Any], config_hash: str) -> None:
        """Start saving a step, unless it is saved already; `state` may be donated as soon as this returns.

        Args:
          progress: what else the run continues from, such as the data iterator's position, as JSON.
          config_hash: identifies the run's config to `restore_newest`.

        Raises:
          CheckpointError: this save or the previous one failed. Older checkpoints are whole.
        """
        self.wait()
        if self.latest == step:
            return
        fields = state._asdict()  # each can be restored alone
        record = {"step": step, "position": progress, "config_hash": config_hash, "arrays": _describe(fields)}
        try:
            response = self._open().save_checkpointables_async(step, fields, force=True, custom_metadata=seal(record))
        except Exception as error:
            raise self._not_saved(step, error) from error
        self._saving = step, response

    def restore_newest(self, abstract: TrainState, *config_hashes: str) -> Checkpoint | None:
        """Restore the newest whole checkpoint with the shardings of `abstract`; return None if there is no checkpoint.

        Newer checkpoints are damaged: they are moved away, with a warning for each. config_hashes: those of the config,
        of which the checkpoint has one.

        Raises:
          CheckpointError: all are damaged, or one belongs to another config or model. Nothing has changed then.
        """
        self._close()
        newest, damaged = _find_newest(self.directory, abstract._asdict(), config_hashes)
        if newest is None:
            self._open()  # rather than at the first save, where it may fail
            return None
        step, record, fields = newest
        self._move_away(damaged, step)
        self._open()
        return Checkpoint(step, TrainState(**fields), record["position"])

    def _open(self) -> ocp.training.Checkpointer:
        """Open Orbax's view of the folder, unless it is open."""
        if self._checkpointer is None:
            try:
                self._checkpointer = ocp.training.Checkpointer(
                    self.directory, preservation_policy=self._policy, cleanup_tmp_directories=True
                )
            except Exception as error:  # the folder, or a checkpoint older than the one restored
                raise CheckpointError(f"{self.directory} cannot be opened: {describe_cause(error)}") from error
        return self._checkpointer

    def _close(self) -> None:
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def _move_away(self, damaged: dict[int, str], used: int) -> None:
        """Move damaged checkpoints, {step: reason}, to their own folder."""
        reason = None
        if jax.process_index() == 0:
            try:
                for step, why in damaged.items():
                    target, taken = self.directory.parent / DAMAGED / str(step), 0
                    target.parent.mkdir(exist_ok=True)
                    while target.exists():
                        taken += 1
                        target = target.with_name(f"{step}.{taken}")
                    os.rename(self.path(step), target)
                    self._warn(f"{self.path(step)} is damaged: {why}. Using step {used}; it is now {target}")
            except OSError as error:
                reason = describe_cause(error)
        if (reason := first_reason(reason)) is not None:
            raise CheckpointError(f"damaged checkpoints in {self.directory} cannot be moved away: {reason}")

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        older = [whole for whole in checkpoint_steps(self.directory.parent) if whole != step]
        then = f"resume from checkpoint {older[-1]}" if older else "start over, as there is no checkpoint yet"
        return CheckpointError(
            f"step {step} could not be saved to {self.path(step)}: {describe_cause(error)}. Fix this, then rerun the "
            f"same command to {then}"
        )


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, whole or damaged, in order; unfinished saves have longer names.

    Raises CheckpointError.
    """
    directory = workdir / CHECKPOINTS
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder: move it away")
    return sorted(int(path.name) for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))


def restore_params(
    workdir: Path,
    abstract_params: Params,
    config_hashes: Collection[str] = (),
    warn: Callable[[str], object] = print_warning,
) -> tuple[int, Params]:
    """Restore the newest whole parameters of a run; return their step and the parameters. Writes nothing.

    The run may go on meanwhile, and remove checkpoints while they are read.

    Args:
      config_hashes: of the run's config, if the checkpoint is to have one of them.
      warn: called with a message for each damaged checkpoint that is newer.

    Raises:
      CheckpointError: there is no whole checkpoint, or it belongs to another config or model.
    """
    _quiet_orbax()
    directory = (workdir / CHECKPOINTS).absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{workdir} has no {CHECKPOINTS}/ folder: is it the --workdir of a run of train.py?")
    newest, damaged = _find_newest(directory, {"params": abstract_params}, config_hashes)
    if newest is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint: let train.py reach one (checkpoint_every)")
    step, _, fields = newest
    if jax.process_index() == 0:
        for newer, why in damaged.items():
            warn(f"{directory / str(newer)} is damaged: {why}. Using step {step}")
    return step, fields["params"]


# ---- the record ------------------------------------------------------------------------------


def _types(tree: Any) -> dict[str, str]:
    """Return {name of an array: its dtype and shape}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _describe(fields: dict[str, Any]) -> dict[str, list[str]]:
    """Return {name of an array: [type, checksum]}."""
    sums = jax.device_get(checksums(fields))
    return {name: [kind, f"{x:08x}"] for (name, kind), x in zip(_types(fields).items(), sums, strict=True)}


@jax.jit
def checksums(tree: Any) -> list[jax.Array]:
    """Return a uint32 for each array, of its words and their places; the same for every sharding.

    A single changed word always changes the checksum; any other change does but for one in 2^32.
    """
    return [_checksum(x) for x in jax.tree.leaves(tree)]


def _checksum(x: jax.Array) -> jax.Array:
    """Return Σ_i mix(w_i + i·odd) mod 2^32 over the words w_i: one pass, no gather, independent of the order of sums.

    `mix` is a bijection. Without it (Σ w_i·odd_i) flipping the highest bit of any two words would go unnoticed. Words
    are the bits of narrow numbers widened to 32, and those of wide ones as several words on a last axis.
    """
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words + index * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _read_record(path: Path, step: int, field: str) -> dict[str, Any]:
    """Return the record. Raises CheckpointError if it is missing or inconsistent."""
    try:
        record = unseal(ocp.metadata(path, field).custom_metadata or {})
    except ValueError as error:
        raise CheckpointError(f"its record is damaged, or of an older version of the code ({error})") from error
    if record["step"] != step:
        raise CheckpointError(f"it was saved as step {record['step']}")
    return record


def _differences(recorded: dict[str, list[str]], wanted: dict[str, Any]) -> list[str]:
    """Describe each array of the fields `wanted` whose type in the checkpoint differs."""
    expected = _types(wanted)
    found = {name: kind for name, (kind, _) in recorded.items() if name.split("/")[0] in wanted}
    return [
        f"{name} is {found.get(name, 'missing')} in it, {expected.get(name, 'missing')} in the model"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


# ---- finding a whole checkpoint --------------------------------------------------------------


def _find_newest(
    directory: Path, wanted: dict[str, Any], config_hashes: Collection[str] = ()
) -> tuple[tuple[int, dict[str, Any], dict[str, Any]] | None, dict[int, str]]:
    """Return (step, record, fields) of the newest whole checkpoint and {newer step: its damage}; None if there is none.

    All processes return the same: what one of them cannot read counts as damaged for all, and the rest follows from the
    record and from checksums over all devices. Raises CheckpointError if all are damaged.

    A run that goes on may remove a checkpoint that is read here, once it has saved a newer one: look again each time.
    """
    damaged: dict[int, str] = {}
    while untried := [step for step in checkpoint_steps(directory.parent) if step not in damaged]:
        step = untried[-1]
        path = directory / str(step)
        record, reason = _attempt(functools.partial(_read_record, path, step, next(iter(wanted))))
        fields: dict[str, Any] | None = None
        if record is not None:
            _check_origin(path, record, wanted, config_hashes)
            fields, reason = _attempt(functools.partial(_load, path, wanted))
        if record is not None and fields is not None:
            changed = [name for name, x in _describe(fields).items() if record["arrays"][name] != x]
            if not changed:
                return (step, record, fields), {at: why for at, why in damaged.items() if at > step}
            reason = f"{len(changed)} arrays are not as they were saved: {_join_first(changed)}"
        damaged[step] = str(reason)
    if not damaged:
        return None, {}
    raise CheckpointError(
        f"{directory} holds no usable checkpoint:\n"
        + "".join(f"  {directory / str(step)} cannot be restored: {why}\n" for step, why in damaged.items())
        + "Restore one of them from a copy, or train in another --workdir."
    )


def _check_origin(path: Path, record: dict[str, Any], wanted: dict[str, Any], config_hashes: Collection[str]) -> None:
    """Raise CheckpointError if the checkpoint belongs to another config or model; an older one would, too."""
    if differences := _differences(record["arrays"], wanted):
        other = "optimizer" if all(each.startswith("opt_state/") for each in differences) else "model"
        raise CheckpointError(
            f"{path} cannot be restored: it belongs to another {other}. {_join_first(differences)}. Give another "
            "--workdir, or the config it was saved with"
        )
    if config_hashes and record["config_hash"] not in config_hashes:
        raise CheckpointError(
            f"{path} was saved by a run with another config (hash {record['config_hash']}, here "
            f"{next(iter(config_hashes))}): "
            "give another --workdir, or the config it was saved with; if config.json was changed, restore it"
        )


def _load(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read fields in each process on its own, so that none waits for one that fails."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )
    with ocp.Context(multiprocessing_options=alone if jax.process_count() > 1 else None):
        return ocp.load_checkpointables(path, wanted)


def _attempt(read: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
    """Return (result, None), or (None, reason) if `read` failed in any process."""
    result: dict[str, Any] | None = None
    reason: str | None = None
    try:
        result = read()
    except CheckpointError as error:
        reason = str(error)
    except Exception as error:  # Orbax raises many kinds
        reason = describe_cause(error, otherwise="its metadata cannot be read")
    reason = first_reason(reason)
    return (result, None) if reason is None else (None, reason)


# ---- messages --------------------------------------------------------------------------------


@functools.cache
def _quiet_orbax() -> None:
    """Print, from now on, no log records of Orbax, which repeat what it raises, nor Python's complaints of its reads.

    When one read fails, Orbax abandons the others. They end at any time later, in threads of TensorStore or when Python
    collects them, and nothing can catch their errors: a damaged checkpoint of 120 arrays prints about as many
    tracebacks.
    """
    is_unrelated = lambda text: not re.search("orbax/checkpoint|tensorstore|Event loop is closed", text)
    for name in ("absl", "asyncio", None):
        logging.getLogger(name).addFilter(lambda record: is_unrelated(record.pathname + record.getMessage()))
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def report_unrelated(unraisable: Any) -> None:
        if is_unrelated("".join(traceback.format_exception(unraisable.exc_value))):
            report(unraisable)

    sys.unraisablehook = report_unrelated


def describe_cause(error: BaseException, otherwise: str = "Orbax failed") -> str:
    """Return the system's or TensorStore's error if there is one, else the innermost cause, which Orbax's errors hide.

    Args:
      otherwise: what an error of neither means: it comes without a sentence, such as KeyError("key_type").
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:
            return f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(link)):
            return os.strerror(int(number[1]))
    text = re.sub(r" \[tensorstore_spec.*", "", " ".join(str(chain[-1]).split()))
    if re.match("[A-Z_]{5,}: ", text):  # a status of TensorStore
        return text
    return f"{otherwise} ({type(chain[-1]).__name__}{text and f': {text}'})"


def _join_first(items: list[str]) -> str:
    """Join the first three items and count the others."""
    return "; ".join(items[:3]) + (f"; and {len(items) - 3} more" if len(items) > 3 else "")
