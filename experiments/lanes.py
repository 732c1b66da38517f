"""Runs of one config side by side in one program: lanes, which differ in their seed and learning rate.

A small model keeps no accelerator busy, and compiling takes longer than training it; so its runs share both.

Axes: L lanes, B sequences, N tokens of a window.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.tools import ExperimentError
from heinsen.files import write_atomically
from heinsen.models import Params
from heinsen.training.config import TrainConfig
from heinsen.training.optimizer import make_optimizer_of_rate, make_schedule
from heinsen.training.step import TrainState, init_function, make_step

Batch = Any  # a tree of arrays [L, B, ...]
Loss = Callable[..., jax.Array]  # (model, params, batch, mesh) -> scalar


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
    """The program of a config. loss: of a batch; None: of the model's objective. Its functions take L of everything."""

    config: TrainConfig
    loss: Loss | None = None

    @cached_property
    def start(self) -> Any:
        """seeds [L] -> the states before the first step."""
        return jax.jit(jax.vmap(lambda seed: init_function(self.config.model, self._optimizer(0.0), seed)()))

    @cached_property
    def step(self) -> Any:
        """(states, rates [L], batches) -> (states, losses [L]). The states are donated."""

        def step(state: TrainState, rate: Array, batch: Batch) -> tuple[TrainState, Array]:
            one_pass = jax.tree.map(lambda x: x[None], batch)
            run = make_step(self.config.model, self._optimizer(rate), loss=self.loss)
            state, metrics = run(state, one_pass)
            return state, metrics["loss"]

        return jax.jit(jax.vmap(step), donate_argnums=0)

    def _optimizer(self, rate: Any) -> Any:
        return make_optimizer_of_rate(self.config.optimizer, rate)

    def compile(self, n_lanes: int, batches: Iterable[Batch]) -> "Programs":
        """Compile the step for batches of these shapes."""
        seeds = jnp.zeros(n_lanes, jnp.int32)
        start = self.start.lower(seeds).compile()
        states = jax.eval_shape(self.start, seeds)
        rates = jax.ShapeDtypeStruct((n_lanes,), jnp.float32)
        steps = {shapes_of(batch): self.step.lower(states, rates, batch).compile() for batch in batches}
        return Programs(self.config, states.params, start, steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The compiled functions of `Lanes`, the step by the shapes of its batch."""

    config: TrainConfig
    params: Params  # shapes of all lanes'
    start: Any
    steps: Mapping[tuple[Any, ...], Any]

    def train(
        self, seeds: Sequence[int], rates: Sequence[float], batches: Iterator[Batch], n_steps: int
    ) -> tuple[Params, Float[np.ndarray, "steps L"]]:
        """Return the parameters of all lanes after n_steps, and the losses of each step."""
        optimizer, steps = self.config.optimizer, np.arange(n_steps)
        schedules = [make_schedule(dataclasses.replace(optimizer, learning_rate=rate), n_steps) for rate in rates]
        by_step = np.stack([np.asarray(jax.vmap(each)(steps)) for each in schedules], axis=1).astype(np.float32)
        states, losses = self.start(np.asarray(seeds, np.int32)), []
        for step, batch in zip(steps, batches, strict=False):
            states, loss = self.steps[shapes_of(batch)](states, by_step[step], batch)
            losses.append(loss)
        return states.params, np.stack([np.asarray(x) for x in losses])


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    return tuple(x.shape for x in jax.tree.leaves(batch))


def lane(params: Params, i: int) -> Params:
    """The parameters of one lane."""
    return jax.tree.map(lambda x: x[i], params)


def double(rates: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Rates that extend a grid on the side where its best is at the end; [] where it is inside.

    losses: of the rates; NaN for runs that crashed.
    """
    order = np.argsort(rates)
    rates, losses = np.asarray(rates)[order], np.asarray(losses)[order]
    if np.isnan(losses).all():
        return [float(rates[0] / 2), float(rates[0] / 4)]
    best = int(np.nanargmin(losses))
    if best == 0:
        return [float(rates[0] / 2), float(rates[0] / 4)]
    return [float(rates[-1] * 2), float(rates[-1] * 4)] if best == len(rates) - 1 else []


class Turn:
    """Within `with`, a cell has the device. Raises NoTimeError where no time is left."""

    def __init__(self, minutes: float) -> None:
        self._lock, self._end = threading.Lock(), time.monotonic() + 60 * minutes

    def __enter__(self) -> None:
        self._lock.acquire()
        if time.monotonic() > self._end:
            self._lock.release()
            raise NoTimeError

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class NoTimeError(ExperimentError):
    """A cell that was not begun."""


def run_cells(
    cells: Mapping[str, Any],
    measure: Callable[[str, Any, Turn], dict[str, Any]],
    out: Path,
    minutes: float,
) -> dict[str, dict[str, Any]]:
    """Return {name: what `measure` finds of the cell}; kept in OUT/cells/NAME.json, and not measured again.

    On accelerators several cells compile at a time; `measure` trains when it is its turn. Raises ExperimentError where
    there was no time left, and for cells that fail, after the others.
    """
    file = lambda name: out / "cells" / f"{name.replace(' ', '_').replace(',', '')}.json"
    found = {name: json.loads(file(name).read_text()) for name in cells if file(name).exists()}
    (out / "cells").mkdir(parents=True, exist_ok=True)
    turn = Turn(minutes)

    def run(name: str) -> dict[str, Any]:
        with turn:  # is there time to compile?
            pass
        result = measure(name, cells[name], turn)
        write_atomically(file(name), json.dumps(result) + "\n")
        return result

    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else 6) as pool:
        futures = {pool.submit(run, name): name for name in cells if name not in found}
        for future in as_completed(futures):
            name = futures[future]
            if (error := future.exception()) is None:
                found[name] = future.result()
                print(f"{len(found)} of {len(cells)}: {name}: {found[name]['summary']}", flush=True)
            elif not isinstance(error, NoTimeError):
                print(f"{name}: {type(error).__name__}: {error}"[:2000], flush=True)
    if missing := [name for name in cells if name not in found]:
        raise ExperimentError(f"not done: {'; '.join(missing)}; rerun the same command to go on")
    return {name: found[name] for name in cells}
