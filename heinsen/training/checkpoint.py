"""Checkpoints of a run: parameters, optimizer state and data position together, atomically. The only Orbax import.

WORKDIR/checkpoints/<step>/     one folder a checkpoint; the newest `keep` stay
"""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from heinsen.training.step import TrainState


class CheckpointError(RuntimeError):
    """No whole checkpoint where one is needed, or one that cannot be read."""


class Checkpoints:
    """The checkpoints of one run, saved asynchronously; use as a context manager to wait for the last save."""

    def __init__(self, workdir: Path, keep: int):
        self.directory = (workdir / "checkpoints").absolute()
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._checkpointer.close()

    def wait(self) -> None:
        """Return when the save under way is whole on disk."""
        self._checkpointer.wait()

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def save(self, step: int, state: TrainState, data_iterator: Any) -> None:
        """Begin saving, unless that step is there; `state` may be donated as soon as this returns."""
        if self.latest != step:
            checkpointables = {"params": state.params, "opt_state": state.opt_state, "data": data_iterator}
            self._checkpointer.save_checkpointables_async(step, checkpointables, force=True)

    def restore(self, step: int, abstract: TrainState, data_iterator: Any) -> TrainState:
        """The state saved at `step`; `data_iterator` is moved to where it was. Raises CheckpointError."""
        wanted = {"params": abstract.params, "opt_state": abstract.opt_state, "data": data_iterator}
        loaded = _load(self._checkpointer, step, wanted, self.path(step))
        return TrainState(loaded["params"], loaded["opt_state"])


def restore_params(workdir: Path, abstract_params: Any) -> tuple[int, Any]:
    """(step, parameters) of the newest checkpoint of a run. Raises CheckpointError if there is none."""
    directory = (workdir / "checkpoints").absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{workdir} has no checkpoints/ folder: is it the --workdir of a run of train.py?")
    with ocp.training.Checkpointer(directory) as checkpointer:
        newest = checkpointer.latest
        if newest is None:
            raise CheckpointError(f"{directory} holds no whole checkpoint: let train.py reach one (checkpoint_every)")
        loaded = _load(checkpointer, newest.step, {"params": abstract_params}, directory / str(newest.step))
    return newest.step, loaded["params"]


def with_sharding(abstract: Any, sharding: Sharding) -> Any:
    """The same shapes and dtypes, to be restored onto `sharding`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)


def _load(checkpointer: Any, step: int, wanted: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return checkpointer.load_checkpointables(step, wanted)
    except Exception as error:  # Orbax raises many kinds; the cause names the file or the shape.
        raise CheckpointError(
            f"{path} cannot be restored: {error.__cause__ or error}. It is damaged or belongs to another model; move "
            "it away to use the one before it."
        ) from error
