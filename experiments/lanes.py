"""Runs of one config side by side in one program: lanes, which differ in their seed and learning rate.

A small model keeps no accelerator busy, and compiling takes longer than training it; so its runs share both.

Axes: L lanes, B sequences, N tokens of a window.
"""

import dataclasses
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.reports import best_rate, read_results
from experiments.tools import cell_file, describe_machine, done_cells
from heinsen.errors import InputError
from heinsen.evaluation.document_losses import round_up
from heinsen.files import write_atomically
from heinsen.models import Params, init_params
from heinsen.progress import track
from heinsen.training.config import TrainConfig
from heinsen.training.optimizer import make_optimizer_of_rate, make_schedule
from heinsen.training.step import TrainState, begin_training, make_step

CYCLES = 10  # of steps, in one call of the program
MOST_GRID_EXTENSIONS = 3  # of a grid of learning rates

Batch = Any  # a tree of arrays [L, B, ...]
Loss = Callable[..., jax.Array]  # (model, params, batch, mesh) -> scalar


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
    """Compiled functions of a config for L lanes.

    params: shapes of the parameters of all lanes. draw: seeds [L] -> new parameters. begin: parameters -> the states
    before the first step. run: (states, rates [n, c, L], batches, number of runs) -> (states, losses [n, c, L]) trains
    n cycles of c steps; batches is a tuple of c trees of arrays [n, L, B, ...], since the shapes of a cycle's batches
    may differ.
    """

    config: TrainConfig
    n_lanes: int
    params: Params
    draw: Any
    begin: Any
    run: Any

    @classmethod
    def compile(
        cls,
        config: TrainConfig,
        n_lanes: int,
        cycle: Sequence[Batch],
        loss: Loss | None = None,
        trained: Set[str] | None = None,
    ) -> "Lanes":
        """Compile for batches [L, B, ...] of these shapes. loss, trained: as in `heinsen.training.step.make_step`."""
        model, settings = config.model, config.optimizer

        def step(state: TrainState, rate: Array, batch: Batch) -> tuple[TrainState, Array]:
            one_pass = jax.tree.map(lambda x: x[None], batch)
            state, metrics = make_step(model, make_optimizer_of_rate(settings, rate), loss=loss, trained=trained)(
                state, one_pass
            )
            return state, metrics["loss"]

        def run(states: TrainState, rates: Array, batches: tuple[Batch, ...], n: Array) -> tuple[TrainState, Array]:
            def run_cycle(states: TrainState, given: tuple[Array, tuple[Batch, ...]]) -> tuple[TrainState, Array]:
                losses = []
                for rates, batches in zip(*given, strict=True):
                    states, each = over_lanes(step, n)(states, rates, batches)
                    losses.append(each)
                return states, jnp.stack(losses)

            return jax.lax.scan(run_cycle, states, (rates, batches))

        draw = jax.jit(jax.vmap(lambda seed: init_params(model, jax.random.key(seed))))
        begin = jax.jit(jax.vmap(partial(begin_training, make_optimizer_of_rate(settings, 0.0))))
        params = jax.eval_shape(draw, jax.ShapeDtypeStruct((n_lanes,), jnp.int32))
        states = jax.eval_shape(begin, params)
        rates = jax.ShapeDtypeStruct((CYCLES, len(cycle), n_lanes), jnp.float32)
        batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((CYCLES, *x.shape), x.dtype), tuple(cycle))
        compiled = jax.jit(run, donate_argnums=0).lower(states, rates, batches, jnp.int32(n_lanes)).compile()
        return cls(config, n_lanes, params, draw, begin, compiled)

    def train(
        self,
        seeds: Sequence[int],
        rates: Sequence[float],
        batch_of: Callable[[int], Batch],
        n_steps: int,
        params: Params | None = None,
        look: Callable[[int, Params], None] | None = None,
    ) -> tuple[Params, Float[np.ndarray, "steps L"]]:
        """Return the parameters after n_steps, rounded up to `CYCLES` whole cycles, and all losses, of all lanes.

        With fewer seeds and rates than lanes, the last lanes mean nothing, and CPUs leave them out.

        Args:
          batch_of: the batch [L, B, ...] of a step, from 0.
          params: those to begin with, of all lanes (None: new ones).
          look: called every `CYCLES` cycles with the number of steps so far, and the parameters, which it may not keep.
        """
        n_runs = len(rates)
        seeds, rates = ([*each, *each[-1:] * (self.n_lanes - n_runs)] for each in (list(seeds), list(rates)))
        length = self.run.in_avals[0][1].shape[1]
        n_steps = round_up(n_steps, CYCLES * length)
        warmup = min(self.config.optimizer.warmup_steps, n_steps // 4)  # a rehearsal is shorter than the config's
        settings = dataclasses.replace(self.config.optimizer, warmup_steps=warmup)
        schedules = [make_schedule(dataclasses.replace(settings, learning_rate=x), n_steps) for x in rates]
        by_step = np.stack([np.asarray(jax.vmap(each)(np.arange(n_steps))) for each in schedules], axis=1)
        by_cycle = by_step.astype(np.float32).reshape(-1, CYCLES, length, self.n_lanes)
        states, losses = self.begin(self.draw(np.asarray(seeds, np.int32)) if params is None else params), []
        size = lambda _: CYCLES * length
        label = f"{n_runs} lanes, {self.config.model.attention}"
        for block, block_rates in enumerate(track(by_cycle, label, n_steps, size, "steps")):
            first = block * CYCLES * length
            in_cycle = lambda place, first=first: [batch_of(first + i * length + place) for i in range(CYCLES)]
            stack = lambda *x: np.stack(x)
            batches = tuple(jax.tree.map(stack, *in_cycle(place)) for place in range(length))
            states, each = self.run(states, block_rates, batches, np.int32(n_runs))
            losses.append(np.asarray(each).reshape(-1, self.n_lanes))
            if look is not None:
                look(first + CYCLES * length, states.params)
        return states.params, np.concatenate(losses)

    def tune(
        self,
        rates: Sequence[float],
        seed: int,
        batch_of: Callable[[int], Batch],
        n_steps: int,
        loss: Callable,
        params: Params | None = None,
    ) -> tuple[dict[float, float], Params]:
        """({learning rate: loss} of runs with one seed, on the grid of rates and its extensions; the best parameters).

        loss: (the parameters of all lanes) -> [L]. params: as in `train`.
        """
        losses: dict[float, float] = {}
        ends: dict[float, Params] = {}
        for tried in grids(rates, losses):
            found, _ = self.train([seed] * len(tried), tried, batch_of, n_steps, params)
            losses |= dict(zip(tried, loss(found).tolist(), strict=False))
            ends |= {rate: jax.tree.map(lambda x, i=i: x[i], found) for i, rate in enumerate(tried)}
        return losses, ends[best_rate(losses)]


def over_lanes(step: Callable[..., Any], n: Array | None = None) -> Callable[..., Any]:
    """`jax.vmap(step)`; on CPUs the first n lanes (None: all) in turn, and 0 of the others.

    So rows that one lane computes exactly do not slow the others.
    """
    over_all = jax.vmap(step)

    def in_turn(*lanes: Any) -> Any:
        def body(i: Array, out: Any) -> Any:
            found = step(*jax.tree.map(lambda x: x[i], lanes))
            return jax.tree.map(lambda x, own: x.at[i].set(own), out, found)

        out = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(over_all, *lanes))
        return jax.lax.fori_loop(0, len(jax.tree.leaves(lanes)[0]) if n is None else n, body, out)

    return in_turn if jax.default_backend() == "cpu" else over_all


def grids(rates: Sequence[float], losses: Mapping[float, float]) -> Iterator[list[float]]:
    """Yield a grid of rates, and up to `MOST_GRID_EXTENSIONS` extensions of it.

    losses: of the rates so far, which the caller adds; NaN for runs that crashed.
    """
    for _ in range(1 + MOST_GRID_EXTENSIONS):
        yield list(rates)
        if not (rates := extend(losses)):
            break


def extend(losses: Mapping[float, float]) -> list[float]:
    """Rates that extend a grid on the side where its best is at the end; [] where it is inside."""
    rates, best = sorted(losses), best_rate(losses)
    if best == rates[0]:
        return [best / 2, best / 4]
    return [best * 2, best * 4] if best == rates[-1] else []


class Turn:
    """Within `with`, a cell has the device. Raises NoTimeError where no time is left."""

    def __init__(self, minutes: float | None) -> None:
        self._lock = threading.Lock()
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.is_over:
            self._lock.release()
            raise NoTimeError

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self._end


class NoTimeError(Exception):
    """A cell that was not begun."""


def run_cells(
    cells: Mapping[str, Any],
    measure: Callable[[Any, Turn], dict[str, Any]],
    out: Path,
    minutes: float | None,
    numbers: Sequence[str] | None,
) -> dict[str, Any]:
    """Return "cells" of results.json, {name: what `measure` finds of the cell}, and "missing", the names of the others.

    What is found is kept in OUT/cells/NAME.json, and not measured again, nor is what OUT/results.json has. On
    accelerators several cells compile at a time; `measure` trains when it is its turn.

    Args:
      minutes, numbers: of the flags --minutes and --cells, in this order.

    Raises InputError if there is no such number, or no cell is done.
    """
    if wrong := [number for number in numbers or () if number not in map(str, range(1, len(cells) + 1))]:
        raise InputError(f"--cells={','.join(wrong)}: there are cells 1 to {len(cells)}: {'; '.join(cells)}")
    file, found = lambda name: cell_file(name, out), done_cells(cells, out)
    (out / "cells").mkdir(parents=True, exist_ok=True)
    names = list(cells)
    chosen = names if numbers is None else [names[int(number) - 1] for number in numbers]
    turn = Turn(minutes)

    def run(name: str) -> None:
        if turn.is_over:  # before it compiles
            raise NoTimeError
        write_atomically(file(name), json.dumps(describe_machine() | measure(cells[name], turn)) + "\n")

    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else 4) as pool:
        futures = {pool.submit(run, name): name for name in chosen if name not in found}
        for future in as_completed(futures):
            name = futures[future]
            if (error := future.exception()) is None:
                found[name] = dict(read_results(file(name)))
                print(f"{len(found)} of {len(cells)}: {name}: {found[name]['summary']}", file=sys.stderr, flush=True)
            elif not isinstance(error, NoTimeError):
                print(f"{name}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
    if not found:
        raise InputError("no cell is done, see above: give more --minutes, or lower what fails")
    done = {name: found[name] for name in cells if name in found}
    return dict(cells=done, missing=[name for name in cells if name not in done])


def machines(cells: Mapping[str, Any]) -> str:
    """Where cells were measured, for a report."""
    return " and ".join(sorted({f"{cell['machine']}, jax {cell['jax']}" for cell in cells.values()}))


def not_run(results: Mapping[str, Any]) -> list[str]:
    """The lines of a report that name the cells without results, if any."""
    return [f"Not run yet: {'; '.join(results['missing'])}.", ""] if results["missing"] else []
