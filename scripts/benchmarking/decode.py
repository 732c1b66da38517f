"""Decoding: time per token and memory by the context, for a config's model and the same model with softmax attention.

Both have random parameters and synthetic states, as if so many tokens had been read. The time to read the parameters
once is the lower bound for one text.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.config import from_mapping
from heinsen.decoding import Prefix, Sampling, decode, step_params
from heinsen.errors import InputError
from heinsen.files import make_folder
from heinsen.models import ModelConfig, Params, count_params, init_model_state, init_params
from heinsen.ops.states import LogState
from heinsen.parallel import keep_host_memory
from heinsen.training.config import TrainConfig
from scripts.benchmarking import decode_report
from scripts.benchmarking.measure import (
    device_name,
    free_memory,
    seconds,
    versions,
    write_results,
)


class Case(NamedTuple):
    """What is timed: an attention, so many texts at a time, so many tokens before."""

    name: str
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Contexts in ascending order; all of them are timed with the first batch size, the others with the first one."""

    contexts: Sequence[int]
    batches: Sequence[int]
    call_tokens: int
    repeats: int

    def cases(self, name: str) -> list[Case]:
        return [
            Case(name, batch, context)
            for batch in self.batches
            for context in (self.contexts if batch == self.batches[0] else self.contexts[:1])
        ]


def benchmark_decode(values: dict[str, Any], settings: Settings, out: Path) -> str:
    """Run the benchmark, write OUT/results.json and OUT/decode.png, and return the report.

    Raises InputError and ConfigError.
    """
    own = from_mapping(TrainConfig, values).model
    try:
        models = {own.attention: own, "softmax": dataclasses.replace(own, attention="softmax")}
    except ValueError as error:  # softmax attention rejects a field that the config's own attention takes
        raise InputError(str(error)) from error
    make_folder(out)
    keep_host_memory()
    contestants = {name: Contestant.create(model) for name, model in models.items()}
    race = Race(settings, contestants, own.attention)
    fixed = dict(
        device=device_name(),
        versions=versions(),
        parameters=contestants[own.attention].n_params,
        parameter_bytes=contestants[own.attention].n_bytes,
        dtype=own.dtype,
        call_tokens=settings.call_tokens,
        config=values,
    )
    # States of constant size are all held at once and take turns. Caches are too large for that: one after the other.
    constant = [name for name, model in models.items() if not model.has_cache]
    rounds = [[case for name in constant for case in settings.cases(name)]]
    for name in [name for name in models if name not in constant]:
        in_turn = sorted(settings.cases(name), key=lambda case: -settings.batches.index(case.batch))
        rounds += [[case] for case in in_turn]
    for cases in rounds:
        race.run(cases)
        measured = dict(
            read_milliseconds=1e3 * statistics.median(race.read_times), results=race.results(), left_out=race.left_out
        )
        summary = fixed | measured
        write_results(out, summary)  # so far: a process that is stopped leaves what it has found
    paths = out / "results.json", decode_report.plot(summary, settings.batches[0], out / "decode.png")
    report = decode_report.report(summary, own.attention, settings.contexts, settings.batches)
    return "\n".join([*report, f"written: {', '.join(map(str, paths))}"])


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A model with random parameters. The embedding is not counted: a step reads one row of it per text."""

    model: ModelConfig
    params: Params

    @classmethod
    def create(cls, model: ModelConfig) -> "Contestant":
        return cls(model, step_params(model, init_params(model, jax.random.key(0))))

    @property
    def n_params(self) -> int:
        return count_params(self.params) - self.params["embedding"].size

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.params)) - self.params["embedding"].nbytes

    def state_bytes(self, batch: int, capacity: int) -> int:
        state = jax.eval_shape(lambda: init_model_state(self.model, batch, capacity))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


class Race:
    """Times the contestants, and in turn with them a sum over as many bytes as the parameters of `reader` have."""

    def __init__(self, settings: Settings, contestants: dict[str, Contestant], reader: str):
        self.settings, self._contestants = settings, contestants
        self._room = settings.call_tokens * (settings.repeats + 2)  # tokens that will be decoded
        self._read = prepare_reading(contestants[reader].n_bytes)
        self._read()
        self.read_times: list[float] = []
        self.times: dict[Case, list[float]] = {}
        self.state_bytes: dict[Case, int] = {}
        self.left_out: list[dict[str, Any]] = []

    def run(self, cases: Sequence[Case]) -> None:
        """Time some cases in turn; those whose states do not fit into memory are left out."""
        calls = {case: call for case in cases if (call := self._prepare(case)) is not None}
        for call in calls.values():
            call()
        for _ in range(self.settings.repeats):
            self.read_times.append(seconds(self._read))
            for case, call in calls.items():
                self.times.setdefault(case, []).append(seconds(call) / self.settings.call_tokens)
        for case in calls:
            milliseconds = 1e3 * statistics.median(self.times[case])
            print(f"{tuple(case)}: {milliseconds:.2f} ms per step", file=sys.stderr, flush=True)

    def results(self) -> list[dict[str, Any]]:
        return [
            dict(
                **case._asdict(),
                milliseconds_per_step=1e3 * statistics.median(times),
                fastest_milliseconds_per_step=1e3 * min(times),
                tokens_per_second=case.batch / statistics.median(times),
                state_bytes=self.state_bytes[case],
            )
            for case, times in self.times.items()
        ]

    def _prepare(self, case: Case) -> Callable[[], Any] | None:
        """Return a call that decodes `call_tokens` tokens."""
        name, batch, context = case
        contestant = self._contestants[name]
        size = contestant.state_bytes(batch, context + self._room)
        if (free := free_memory()) is not None and size > 0.9 * free:
            self.left_out.append(dict(**case._asdict(), state_bytes=size))
            return None
        prefix = make_prefix(contestant.model, batch, context, self._room)
        self.state_bytes[case] = sum(x.nbytes for x in jax.tree.leaves(prefix.state))
        keys, sampling = jax.random.split(jax.random.key(0), batch), Sampling(temperature=0.0)
        model, params, n_tokens = contestant.model, contestant.params, self.settings.call_tokens

        def call() -> np.ndarray:
            nonlocal prefix
            tokens, prefix, _ = decode(model, params, prefix, keys, sampling, n_tokens)
            return tokens

        return call


def prepare_reading(n_bytes: int) -> Callable[[], Any]:
    """Return a call that reads so many bytes once."""
    numbers = jnp.ones(n_bytes // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    return lambda: add_up(numbers).block_until_ready()


def make_prefix(model: ModelConfig, batch: int, context: int, room: int) -> Prefix:
    """Return a synthetic prefix of `context` tokens: sums of a realistic size, and caches with room for more tokens."""
    rng = np.random.default_rng(0)
    draw = lambda x, mean=0.0: jnp.asarray(mean + rng.standard_normal(x.shape, np.float32), x.dtype)
    # Caches are filled with one number: drawing them would take longer than all the rest.
    fill = lambda x: jnp.full(x.shape, 0.01, x.dtype)
    draw_sums = lambda x: draw(x, np.log(context))
    shapes = jax.eval_shape(lambda: init_model_state(model, batch, context + room))
    attention = [jax.tree.map(draw_sums if isinstance(state, LogState) else fill, state) for state in shapes.attention]
    state = shapes._replace(
        position=jax.tree.map(draw, shapes.position),
        attention=tuple(attention),
        convolution=jax.tree.map(fill, shapes.convolution),
        n_tokens=jnp.full(batch, context, jnp.int32),
        document_start=jnp.zeros(batch, jnp.int32),
    )
    return Prefix(jnp.zeros((batch, model.padded_vocab_size), state.position.dtype), state)
