"""Decoding: time per token and memory by the context, for a config's model and the same model with softmax attention.

Both have random parameters and synthetic states, as if so many tokens had been read. The time to read the parameters
once is the lower bound for one text.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.decoding import Prefix, Sampling, decode, step_params
from heinsen.errors import InputError
from heinsen.figures import count_tokens, make_figure, save_figure
from heinsen.host import keep_host_memory
from heinsen.models import ModelConfig, Params, count_params, init_model_state, init_params
from heinsen.ops.states import LogState
from heinsen.training.data import train_config
from scripts.benchmarking import measure

Result = dict[str, Any]


class Case(NamedTuple):
    """A case to time: a model, so many texts at a time, so many tokens before."""

    name: str
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Contexts and batches in ascending order: the first batch size is timed with all contexts, the others with one."""

    contexts: Sequence[int]
    batches: Sequence[int]
    repeats: int
    call_tokens: int = 32

    def cases(self, name: str) -> list[Case]:
        many = [Case(name, batch, self.contexts[0]) for batch in self.batches[1:]]
        return [Case(name, self.batches[0], context) for context in self.contexts] + many

    @property
    def room(self) -> int:
        """The tokens that are decoded after a context."""
        return self.call_tokens * (self.repeats + 1)


def benchmark_decode(values: dict[str, Any], settings: Settings, out: Path) -> str:
    """Run the benchmark, write OUT/results.json and OUT/decode.png, and return the report.

    Raises InputError and ConfigError.
    """
    own = train_config(values).model
    try:
        models = {own.attention: own, "softmax": dataclasses.replace(own, attention="softmax")}
    except ValueError as error:  # softmax attention rejects a field that the config's own attention takes
        raise InputError(str(error)) from error
    fixed = measure.machine() | dict(dtype=own.dtype, config=values)
    summary = time_decoding(models, settings, lambda found: measure.write_results(out, fixed | found))
    plot(fixed | summary, out / "decode.png")
    return "\n".join(report(fixed | summary))


def time_decoding(
    models: Mapping[str, ModelConfig], settings: Settings, write: Callable[[Result], Any] = lambda found: None
) -> Result:
    """Time the models, and in turn with them a sum over as many bytes as the parameters of the first have.

    Models with states of constant size are all held at once and take turns. Caches are too large for that: one after
    the other. What does not fit into memory is left out. write: receives what has been found so far.
    """
    keep_host_memory()
    params = {name: step_params(model, init_params(model, jax.random.key(0))) for name, model in models.items()}
    first, first_params = next(iter(params.items()))
    # The embedding is not counted: a step reads one row of it per text.
    n_params = count_params(first_params) - first_params["embedding"].size
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(first_params)) - first_params["embedding"].nbytes
    read, read_times = prepare_reading(n_bytes), []
    read()
    results: list[Result] = []
    left_out: list[Result] = []
    found: Result = dict(name=first, parameters=n_params, parameter_bytes=n_bytes, results=results, left_out=left_out)

    def run(cases: Sequence[Case]) -> None:
        sizes = {case: state_bytes(models[case.name], case.batch, case.context + settings.room) for case in cases}
        calls: dict[Case, Callable[[], Any]] = {}
        for case, size in sizes.items():
            if (free := measure.free_memory()) is not None and size > 0.9 * free:
                left_out.append(dict(**case._asdict(), state_bytes=size))
            else:
                calls[case] = prepare_decoding(models[case.name], params[case.name], case, settings)
                calls[case]()
        times: dict[Case, list[float]] = {case: [] for case in calls}
        for _ in range(settings.repeats):
            read_times.append(measure.seconds(read))
            for case, call in calls.items():
                times[case].append(measure.seconds(call) / settings.call_tokens)
        for case, each in times.items():
            rates = dict(
                milliseconds_per_step=measure.milliseconds(each), tokens_per_second=case.batch / statistics.median(each)
            )
            results.append(dict(**case._asdict(), **rates, seconds_per_step=each, state_bytes=sizes[case]))
            measure.tell(f"{tuple(case)}: {measure.milliseconds(each):.2f} ms per step")

    constant = [case for name, model in models.items() if not model.has_cache for case in settings.cases(name)]
    cached = [[case] for name, model in models.items() if model.has_cache for case in settings.cases(name)]
    for cases in [constant, *cached]:
        run(cases)  # frees its states
        found["read_milliseconds"] = measure.milliseconds(read_times)
        write(found)
    return found


def prepare_reading(n_bytes: int) -> Callable[[], Any]:
    """Return a call that reads so many bytes once."""
    numbers = jnp.ones(n_bytes // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    return lambda: add_up(numbers).block_until_ready()


def state_bytes(model: ModelConfig, batch: int, capacity: int) -> int:
    state = jax.eval_shape(lambda: init_model_state(model, batch, capacity))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def prepare_decoding(model: ModelConfig, params: Params, case: Case, settings: Settings) -> Callable[[], np.ndarray]:
    """Return a call that decodes `call_tokens` tokens."""
    prefix = make_prefix(model, case.batch, case.context, settings.room)
    keys, sampling = jax.random.split(jax.random.key(0), case.batch), Sampling(temperature=0.0)

    def call() -> np.ndarray:
        nonlocal prefix
        tokens, prefix, _ = decode(model, params, prefix, keys, sampling, settings.call_tokens)
        return tokens

    return call


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


# ---- the report ----------------------------------------------------------------------------------


def report(summary: Result) -> list[str]:
    """Return the lines of the report."""
    reading = f"{summary['parameter_bytes'] / 2**20:.0f} MiB once takes {summary['read_milliseconds']:.1f} ms"
    lines = [
        measure.describe_machine(summary),
        f"{summary['parameters']:,} parameters, {summary['dtype']}; reading their {reading}",
        f"{'attention':<20} {'batch':>5} {'context':>9} {'ms per step':>11} {'tokens/s':>9} {'state, MiB':>11}",
    ]
    for r in summary["results"]:
        lines.append(
            f"{r['name']:<20} {r['batch']:>5} {r['context']:>9} {r['milliseconds_per_step']:>11.2f} "
            f"{r['tokens_per_second']:>9.1f} {r['state_bytes'] / 2**20:>11.3f}"
        )
    for r in summary["left_out"]:
        reason = f"left out: a state of {r['state_bytes'] / 2**30:.1f} GiB"
        lines.append(f"{r['name']:<20} {r['batch']:>5} {r['context']:>9}   {reason}")
    return lines


def plot(summary: Result, path: Path) -> None:
    """Draw time per token and size of the state against the context, for the first batch size."""
    figure, (times, sizes) = make_figure(1, 2, figsize=(10, 4.5))
    results = [r for r in summary["results"] if r["batch"] == summary["results"][0]["batch"]]
    for name in dict.fromkeys(r["name"] for r in results):
        contexts, milliseconds, state_bytes = zip(
            *((r["context"], r["milliseconds_per_step"], r["state_bytes"]) for r in results if r["name"] == name),
            strict=True,
        )
        times.loglog(contexts, milliseconds, "o-", label=name)
        sizes.loglog(contexts, np.array(state_bytes) / 2**20, "o-")
    times.axhline(summary["read_milliseconds"], color="gray", ls=":", label="parameters read once")
    for axis, label in ((times, "ms per token"), (sizes, "MiB of state")):
        axis.set(xlabel="tokens read before", ylabel=label)
        axis.grid(alpha=0.3)
        count_tokens(axis.xaxis)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}" if axis is times else "")
    figure.suptitle(f"decoding, {summary['parameters'] / 1e6:.0f}M parameters: {summary['device']}")
    save_figure(path, figure)
