"""The training step of a config on random tokens, against the rate of a large matrix product."""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from heinsen.chips import chip_of
from heinsen.config import from_mapping
from heinsen.files import make_folder
from heinsen.models import count_params
from heinsen.parallel import keep_host_memory, make_mesh
from heinsen.planning.costs import count_costs
from heinsen.training.config import TrainConfig
from heinsen.training.device_errors import explain_device_errors
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state, make_train_step
from heinsen.training.throughput import compiled_bytes, peak_flops_per_device, train_flops_per_token
from scripts.benchmarking.measure import (
    describe_versions,
    device_name,
    seconds,
    versions,
    write_results,
)

_SIZE = 4096  # of the square matrices


@explain_device_errors()
def benchmark_step(values: dict[str, Any], repeats: int, out: Path) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises ConfigError, DeviceError."""
    config = from_mapping(TrainConfig, values)
    make_folder(out)
    keep_host_memory()
    print("compiling the step", file=sys.stderr, flush=True)
    take_step, n_params, compiled = prepare_step(config)
    dtype = "float32" if jax.default_backend() == "cpu" else config.model.dtype
    multiply = prepare_product(dtype)
    facts = dict(bound_seconds_per_step=bound_of(compiled), peak_bytes=compiled_bytes(compiled))
    facts |= dict(product_dtype=dtype, config=values)
    step_seconds: list[float] = []
    product_seconds: list[float] = []
    for _ in range(repeats):
        for call, times in ((take_step, step_seconds), (multiply, product_seconds)):
            call()
            times.append(seconds(call))
        print(f"step {step_seconds[-1]:.3f} s, product {product_seconds[-1]:.3f} s", file=sys.stderr, flush=True)
        product_rate = 2 * _SIZE**3 / statistics.median(product_seconds) * jax.device_count()
        summary = summarize(config, n_params, step_seconds, product_rate) | facts
        path = write_results(out, summary)  # so far: a stopped process leaves what it has found
    return "\n".join([*report(summary), f"written: {path}"])


def summarize(config: TrainConfig, n_params: int, step_seconds: list[float], product_rate: float) -> dict[str, Any]:
    """Return the rates of the steps that were timed."""
    n_tokens, per_step = config.batch_size * config.sequence_length, statistics.median(step_seconds)
    peak_rate = peak_flops_per_device() * jax.device_count()
    rate = n_tokens * train_flops_per_token(n_params) / per_step
    return dict(
        device=f"{jax.device_count()} x {device_name()}" if jax.device_count() > 1 else device_name(),
        versions=versions(),
        parameters=n_params,
        tokens_per_step=n_tokens,
        seconds_per_step=per_step,
        fastest_seconds_per_step=min(step_seconds),
        steps=len(step_seconds),
        tokens_per_second=n_tokens / per_step,
        flops_per_second=rate,  # 6 per parameter and token
        product_flops_per_second=product_rate,
        share_of_product_rate=rate / product_rate,
        peak_flops_per_second=peak_rate,
        mfu=rate / peak_rate,
    )


def prepare_step(config: TrainConfig) -> tuple[Callable[[], None], int, jax.stages.Compiled]:
    """Return a call that takes one training step, the number of parameters, and the compiled step."""
    mesh, optimizer = make_mesh(), make_optimizer(config.optimizer, config.total_steps)
    state = init_train_state(config.model, optimizer, config.seed, mesh)
    n_params = count_params(state.params)
    shape = config.accumulation_steps, config.sequences_per_pass, config.sequence_length + 1
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
    step = make_train_step(config.model, optimizer, mesh).lower(state, tokens).compile()

    def take_step() -> None:
        nonlocal state
        state, _ = step(state, tokens)
        jax.block_until_ready(state)

    return take_step, n_params, step


def bound_of(compiled: jax.stages.Compiled) -> float | None:
    """Return a lower bound of the time of a call in seconds; None on devices whose rates are not known."""
    chip, text = chip_of(jax.devices()[0].device_kind), compiled.as_text()
    return None if chip is None or text is None else count_costs(text, chip, jax.device_count()).seconds


def prepare_product(dtype: str) -> Callable[[], Any]:
    """Return a call that multiplies two large square matrices."""
    matrix = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), dtype)
    product = jax.jit(lambda x: x @ x).lower(matrix).compile()
    return lambda: product(matrix).block_until_ready()


def report(summary: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    config, rate, product_rate = summary["config"], summary["flops_per_second"], summary["product_flops_per_second"]
    per_step, fastest = summary["seconds_per_step"], summary["fastest_seconds_per_step"]
    bound = summary["bound_seconds_per_step"]
    return [
        f"{summary['device']}; {describe_versions()}",
        f"{summary['parameters']:,} parameters, {config['batch_size']} x {config['sequence_length']} tokens per step",
        f"{per_step:.4g} s per step (fastest {fastest:.4g}), {summary['tokens_per_second']:,.0f} tokens/s",
        f"{rate / 1e9:,.0f} GFLOP/s by 6 N T: {rate / product_rate:.1%} of the {product_rate / 1e9:,.0f} that a "
        f"{summary['product_dtype']} product of {_SIZE} x {_SIZE} matrices reaches",
        f"MFU {summary['mfu']:.1%} of {summary['peak_flops_per_second'] / 1e9:,.0f} GFLOP/s",
        *([] if bound is None else [f"bound: {bound:.4g} s per step, {bound / per_step:.1%} of the measured time"]),
        f"{summary['peak_bytes'] / 2**30:.2f} GiB per device by XLA's analysis",
    ]
