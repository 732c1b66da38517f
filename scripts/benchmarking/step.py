"""The training step of a config on random tokens, against the rate of large matrix products.

On GPUs the same model with softmax attention takes part, which is cuDNN's there, without a forget gate.
"""

import dataclasses
import importlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

import heinsen
from heinsen.chips import chip_of
from heinsen.contrib.hlo_cost import count_costs
from heinsen.errors import HeinsenError, InputError
from heinsen.host import keep_host_memory
from heinsen.models import count_params
from heinsen.plan.plan import find_notes
from heinsen.training.config import TrainConfig
from heinsen.training.data import train_config
from heinsen.training.devices import (
    DeviceError,
    compiled_bytes,
    compiler_options,
    explain_device_errors,
    peak_flops_per_device,
    train_flops_per_token,
)
from scripts.benchmarking import measure
from scripts.benchmarking.versions import old_package

_SIZE = 4096  # of the square matrices
_SOFTMAX = {"attention": "softmax", "forget_gate": "none", "implementation": None}


class Case(NamedTuple):
    """A step to time: a name, a config, and the version of heinsen that takes the step."""

    name: str
    config: TrainConfig
    package: ModuleType = heinsen


def benchmark_step(
    values: dict[str, Any], lengths: Sequence[int], only: Sequence[str], old: str | None, repeats: int, out: Path
) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises ConfigError, InputError, DeviceError.

    lengths: tokens of a sequence, (): the config's. only: the kinds of attention to time, (): all. old: a commit, whose
    step takes part.
    """
    cases, notes = choose_cases(values, lengths, only), find_notes(train_config(values).model)
    summary = measure.machine() | dict(devices=jax.device_count(), config=values, notes=notes)
    summary |= dict(compiler_options=compiler_options(), rows=[], left_out=[])
    keep_host_memory()
    products = prepare_products("float32" if jax.default_backend() == "cpu" else values["model"]["dtype"])
    with old_package(old) as package:
        for each in cases:
            each += [] if package is None else [Case("old", each[0].config, package)]
            time_steps(each, products, repeats, summary)
            measure.write_results(out, summary)
    if not summary["rows"]:
        raise DeviceError(summary["left_out"][0]["why"])
    return "\n".join(report(summary))


def choose_cases(values: dict[str, Any], lengths: Sequence[int], only: Sequence[str]) -> list[list[Case]]:
    """Return the cases at each length, where a step has as many tokens. Raises ConfigError, InputError."""
    config = train_config(values)
    own = config.model.attention
    models: dict[str, dict[str, Any]] = {own: {}} | ({} if own == "softmax" else {"softmax": _SOFTMAX})
    if unknown := set(only) - models.keys():
        raise InputError(f"--only={','.join(sorted(unknown))}: here there are {', '.join(models)}")
    has_softmax = jax.default_backend() == "gpu" and config.model.d_key == config.model.d_value
    names = only or [name for name in models if name == own or has_softmax]
    cases = []
    for length in lengths or [config.sequence_length]:
        batch_size, rest = divmod(config.tokens_per_step, length)
        if rest:
            raise InputError(f"--lengths={length} does not divide a step's {config.tokens_per_step} tokens")
        sizes = values | dict(sequence_length=length, batch_size=batch_size)
        cases.append([Case(name, train_config(sizes | dict(model=values["model"] | models[name]))) for name in names])
    return cases


def time_steps(cases: Sequence[Case], products: Callable[[], Any], repeats: int, summary: dict[str, Any]) -> None:
    """Time the steps in turn, and with them the products; add to the rows of the summary, or to what is left out."""
    rows, calls = [], [products]
    for case in cases:
        row: dict[str, Any] = dict(name=case.name, tokens=case.config.sequence_length)
        measure.tell(f"{case.name}, T={row['tokens']}: compiling the step")
        try:
            with explain_device_errors():
                take_step, n_params, compiled = prepare_step(case.config, case.package)
                take_step()
        except HeinsenError as error:  # out of memory, or a kernel that is not for this device
            summary["left_out"].append(row | dict(why=str(error)))
            continue
        memory = dict(bound_seconds_per_step=bound_of(compiled), peak_bytes=compiled_bytes(compiled))
        rows.append(row | memory | dict(parameters=n_params, tokens_per_step=case.config.tokens_per_step))
        calls.append(take_step)
    times = measure.time_in_turn(dict(enumerate(calls)), repeats)
    n_devices = jax.device_count()
    product_rate = n_devices * _n_products() * 2 * _SIZE**3 / statistics.median(times[0])
    for i, row in enumerate(rows, start=1):
        seconds = statistics.median(times[i])
        rate = row["tokens_per_step"] * train_flops_per_token(row["parameters"]) / seconds
        row |= dict(seconds_per_step=seconds, tokens_per_second=row["tokens_per_step"] / seconds)
        row |= dict(
            flops_per_second=rate, mfu=rate / (peak_flops_per_device() * n_devices)
        )  # 6 per parameter and token
        row |= dict(product_flops_per_second=product_rate, share_of_product_rate=rate / product_rate)
        summary["rows"].append(row | dict(seconds=dict(step=times[i], products=times[0])))


def prepare_step(
    config: TrainConfig, package: ModuleType = heinsen
) -> tuple[Callable[[], None], int, jax.stages.Compiled]:
    """Return a call that takes one training step, the number of parameters, and the compiled step.

    package: a version of heinsen that can read the config.
    """
    part = lambda name: importlib.import_module(f"{package.__name__}.{name}")
    training, mesh = part("training.step"), part("parallel").make_mesh()
    config = part("config").from_mapping(part("training.config").TrainConfig, dataclasses.asdict(config))
    optimizer = part("training.optimizer").make_optimizer(config.optimizer, config.total_steps)
    state = training.init_train_state(config.model, optimizer, config.seed, mesh)
    n_params = count_params(state.params)
    shape = config.accumulation_steps, config.sequences_per_microbatch, config.sequence_length + 1
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
    step = training.make_train_step(config.model, optimizer, mesh).lower(state, tokens).compile()

    def take_step() -> None:
        nonlocal state
        state, _ = step(state, tokens)
        jax.block_until_ready(state)

    return take_step, n_params, step


def bound_of(compiled: jax.stages.Compiled) -> float | None:
    """Return a lower bound of the time of a call in seconds; None on devices whose rates are not known."""
    chip, text = chip_of(jax.devices()[0].device_kind), compiled.as_text()
    return None if chip is None or text is None else count_costs(text, chip, jax.device_count()).seconds


def prepare_products(dtype: str) -> Callable[[], Any]:
    """Return a call that multiplies large square matrices, one after the other in one program."""

    def multiply(matrix: jax.Array) -> jax.Array:
        product = matrix
        for _ in range(_n_products()):  # a loop on the device would copy what it carries
            product = product @ matrix
        return product

    matrix = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), dtype) * _SIZE**-0.5  # products neither grow nor fade
    compiled = jax.jit(multiply).lower(matrix).compile()
    return lambda: compiled(matrix).block_until_ready()


def _n_products() -> int:
    """Many on accelerators, where a product takes no longer than the dispatch of a program."""
    return 1 if jax.default_backend() == "cpu" else 64


def report(summary: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    rows = summary["rows"]
    rate, options = rows[0]["product_flops_per_second"], ", ".join(summary["compiler_options"])
    lines = [
        f"{summary['devices']} x {measure.describe_machine(summary)}",
        f"{rows[0]['tokens_per_step']:,} tokens per step; XLA's options: {options or 'none'}",
        f"products: the share of the rate of {_SIZE} x {_SIZE} matrix products, {rate / 1e9:,.0f} GFLOP/s",
        f"{'attention':<12} {'T':>6} {'parameters':>12} {'s per step':>10} {'tokens/s':>9} {'GFLOP/s':>9} {'MFU':>6} "
        f"{'products':>9} {'bound, s':>9} {'reached':>8} {'GiB by XLA':>10}",
    ]
    for row in rows:
        bound = row["bound_seconds_per_step"]
        bounds = ("-", "-") if bound is None else (f"{bound:.4g}", f"{bound / row['seconds_per_step']:.1%}")
        lines.append(
            f"{row['name']:<12} {row['tokens']:>6} {row['parameters']:>12,} {row['seconds_per_step']:>10.4g} "
            f"{row['tokens_per_second']:>9,.0f} {row['flops_per_second'] / 1e9:>9,.0f} {row['mfu']:>6.1%} "
            f"{row['share_of_product_rate']:>9.1%} {bounds[0]:>9} {bounds[1]:>8} {row['peak_bytes'] / 2**30:>10.2f}"
        )
    lines += [f"left out: {x['name']}, T={x['tokens']}: {x['why']}" for x in summary["left_out"]]
    return lines + [f"note: {note}" for note in summary["notes"]]
