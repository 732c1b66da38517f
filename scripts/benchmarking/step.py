"""The training step of a config on random tokens, against the rate of a large matrix product."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from heinsen.chips import chip_of
from heinsen.contrib.hlo_cost import count_costs
from heinsen.host import keep_host_memory
from heinsen.models import count_params
from heinsen.parallel import make_mesh
from heinsen.training.config import TrainConfig
from heinsen.training.data import train_config
from heinsen.training.devices import compiled_bytes, explain_device_errors, peak_flops_per_device, train_flops_per_token
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state, make_train_step
from scripts.benchmarking import measure

_SIZE = 4096  # of the square matrices


@explain_device_errors()
def benchmark_step(values: dict[str, Any], repeats: int, out: Path) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises ConfigError, DeviceError."""
    config = train_config(values)
    keep_host_memory()
    measure.tell("compiling the step")
    take_step, n_params, compiled = prepare_step(config)
    product_dtype = "float32" if jax.default_backend() == "cpu" else config.model.dtype
    times = measure.time_in_turn({"step": take_step, "product": prepare_product(product_dtype)}, repeats)
    n_devices, n_tokens = jax.device_count(), config.tokens_per_step
    per_step = statistics.median(times["step"])
    product_rate = 2 * _SIZE**3 / statistics.median(times["product"]) * n_devices
    peak_rate = peak_flops_per_device() * n_devices
    rate = n_tokens * train_flops_per_token(n_params) / per_step
    summary = measure.machine() | dict(
        devices=n_devices,
        parameters=n_params,
        tokens_per_step=n_tokens,
        seconds_per_step=per_step,
        tokens_per_second=n_tokens / per_step,
        flops_per_second=rate,  # 6 per parameter and token
        product_dtype=product_dtype,
        product_flops_per_second=product_rate,
        share_of_product_rate=rate / product_rate,
        peak_flops_per_second=peak_rate,
        mfu=rate / peak_rate,
        bound_seconds_per_step=bound_of(compiled),
        peak_bytes=compiled_bytes(compiled),
        seconds=times,
        config=values,
    )
    measure.write_results(out, summary)
    return "\n".join(report(summary))


def prepare_step(config: TrainConfig) -> tuple[Callable[[], None], int, jax.stages.Compiled]:
    """Return a call that takes one training step, the number of parameters, and the compiled step."""
    mesh, optimizer = make_mesh(), make_optimizer(config.optimizer, config.total_steps)
    state = init_train_state(config.model, optimizer, config.seed, mesh)
    n_params = count_params(state.params)
    shape = config.accumulation_steps, config.sequences_per_microbatch, config.sequence_length + 1
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
    per_step, bound = summary["seconds_per_step"], summary["bound_seconds_per_step"]
    return [
        f"{summary['devices']} x {measure.describe_machine(summary)}",
        f"{summary['parameters']:,} parameters, {config['batch_size']} x {config['sequence_length']} tokens per step",
        f"{per_step:.4g} s per step, {summary['tokens_per_second']:,.0f} tokens/s",
        f"{rate / 1e9:,.0f} GFLOP/s by 6 N T: {rate / product_rate:.1%} of the {product_rate / 1e9:,.0f} that a "
        f"{summary['product_dtype']} product of {_SIZE} x {_SIZE} matrices reaches",
        f"MFU {summary['mfu']:.1%} of {summary['peak_flops_per_second'] / 1e9:,.0f} GFLOP/s",
        *([] if bound is None else [f"bound: {bound:.4g} s per step, {bound / per_step:.1%} of the measured time"]),
        f"{summary['peak_bytes'] / 2**30:.2f} GiB per device by XLA's analysis",
    ]
