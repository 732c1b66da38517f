"""Requirements of a run, from its compiled step: memory, time, device-hours. Writes nothing to a run folder."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from heinsen.parallel import keep_host_memory, make_mesh, place_batch, process_rows, split_batch, with_shardings
from heinsen.training.device_errors import explain_device_errors
from heinsen.training.objective import get_objective
from heinsen.training.optimizer import make_optimizer
from heinsen.training.run import TrainConfig, check_mesh
from heinsen.training.step import TrainState, abstract_train_state, init_train_state, make_train_step
from heinsen.training.throughput import (
    available_bytes,
    compiled_bytes,
    format_bytes,
    peak_flops_per_device,
    train_flops_per_token,
)

_MAX_SECONDS = 300.0  # for the timed steps
_ASSUMED_MFU = (0.2, 0.4)  # where no step is timed


@dataclasses.dataclass(frozen=True)
class Plan:
    """Size, memory and time of a run.

    bytes_* are per device, by XLA's analysis of the compiled step: of the parameters and optimizer state, and of all
    that exists at once in a step (with the batch, gradients and activations); bytes_device is the device's memory,
    where the backend reports it. peak_flops is of all devices. seconds_per_step is None if no step was timed, for the
    reason not_timed.
    """

    n_devices: int
    device: str
    mesh: dict[str, int]
    n_params: int
    batch_size: int
    sequence_length: int
    total_tokens: int
    total_steps: int
    bytes_state: int
    bytes_step: int
    bytes_device: int | None
    peak_flops: float
    seconds_compiling: float
    seconds_per_step: float | None
    not_timed: str | None

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def flops_per_step(self) -> float:
        return train_flops_per_token(self.n_params) * self.tokens_per_step

    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        of_device = f", of {format_bytes(self.bytes_device)}" if self.bytes_device else ""
        rows = [
            ("devices", f"{self.n_devices} x {self.device}; {shape}"),
            ("parameters", f"{self.n_params:,}"),
            ("step", f"{self.batch_size} x {self.sequence_length} tokens = {self.tokens_per_step:,}"),
            ("run", f"{self.total_tokens:,} tokens, {self.total_steps:,} steps"),
            ("state per device", f"{format_bytes(self.bytes_state)} (parameters and optimizer)"),
            ("memory per device", f"{format_bytes(self.bytes_step)} in a step, by XLA's analysis{of_device}"),
            (
                "FLOPs per step",
                f"{self.flops_per_step:.3g} (6 N per token); peak {self.peak_flops:.3g} FLOP/s of all devices",
            ),
            ("compile time", f"{self.seconds_compiling:.0f} s"),
            *self._time_rows(),
        ]
        return "\n".join(f"{name:<17} {text}" for name, text in rows)

    def _time_rows(self) -> list[tuple[str, str]]:
        """The time of a step and of the run: measured, or at assumed rates."""
        if self.seconds_per_step is None:
            rows = [("time", f"not measured: {self.not_timed}")]
            seconds = {f"if MFU were {mfu:.0%}": self.flops_per_step / (mfu * self.peak_flops) for mfu in _ASSUMED_MFU}
        else:
            mfu = self.flops_per_step / self.seconds_per_step / self.peak_flops
            rate = self.tokens_per_step / self.seconds_per_step
            rows = [("time per step", f"{self.seconds_per_step:.3g} s, {rate:,.0f} tokens/s, MFU {mfu:.1%}")]
            seconds = {"measured": self.seconds_per_step}
        for label, each in seconds.items():
            hours = each * self.total_steps / 3600
            total = f"{_format_hours(hours)} for the whole run, {hours * self.n_devices:,.1f} device-hours"
            rows.append((label, total))
        return rows


def _format_hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


@explain_device_errors()
def plan(config: TrainConfig, steps: int) -> Plan:
    """Compile the step of a run on these devices, and time `steps` of it on random tokens (0: none).

    Times nothing if the step needs more memory than there is, or would take minutes at the device's peak rate. Raises
    MeshError, DeviceError.
    """
    keep_host_memory()
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    abstract = abstract_train_state(config.model, optimizer, mesh, config.carry_rows)
    arrays = _random_batches(config, mesh)
    start = time.perf_counter()
    step = make_train_step(config.model, optimizer, mesh, get_objective(config.model).loss, config.carry_rows)
    compiled = step.lower(abstract, _abstract_batches(config, mesh, arrays)).compile()
    untimed = _untimed_plan(config, mesh, abstract, compiled, time.perf_counter() - start)
    if reason := _reason_not_to_time(untimed, steps):
        return dataclasses.replace(untimed, not_timed=reason)
    state = init_train_state(config.model, optimizer, config.seed, mesh, config.carry_rows)
    seconds = _time_steps(compiled, state, place_batch(mesh, arrays, axis=1), steps)
    return dataclasses.replace(untimed, seconds_per_step=seconds)


def _random_batches(config: TrainConfig, mesh: Mesh) -> dict[str, np.ndarray]:
    n_windows = config.accumulation_steps * len(process_rows(mesh, config.sequences_per_pass))
    shape = n_windows, config.sequence_length + 1
    windows = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    return get_objective(config.model).make_batches(config, windows, 1, np.arange(n_windows))


def _abstract_batches(config: TrainConfig, mesh: Mesh, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the shapes of the global batches, of which `arrays` are this process's rows."""
    global_shape = lambda x: (x.shape[0], config.sequences_per_pass, x.shape[2])
    abstract = {name: jax.ShapeDtypeStruct(global_shape(x), x.dtype) for name, x in arrays.items()}
    return with_shardings(abstract, split_batch(mesh, axis=1))


def _untimed_plan(
    config: TrainConfig, mesh: Mesh, abstract: TrainState, compiled: jax.stages.Compiled, seconds_compiling: float
) -> Plan:
    bytes_on_device = lambda x: x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
    memory = jax.local_devices()[0].memory_stats() or {}
    return Plan(
        n_devices=jax.device_count(),
        device=jax.devices()[0].device_kind,
        mesh=dict(mesh.shape),
        n_params=sum(x.size for x in jax.tree.leaves(abstract.params)),
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        total_tokens=config.total_tokens,
        total_steps=config.total_steps,
        bytes_state=sum(map(bytes_on_device, jax.tree.leaves(abstract))),
        bytes_step=compiled_bytes(compiled),
        bytes_device=memory.get("bytes_limit"),
        peak_flops=(config.peak_flops or peak_flops_per_device()) * jax.device_count(),
        seconds_compiling=seconds_compiling,
        seconds_per_step=None,
        not_timed=None,
    )


def _reason_not_to_time(untimed: Plan, steps: int) -> str | None:
    n_steps = steps + 1  # the first warms up
    at_peak = untimed.flops_per_step / untimed.peak_flops * n_steps
    reasons = {
        "--plan_steps=0": steps == 0,
        "it needs more memory than there is": (
            (available := available_bytes()) is not None and untimed.bytes_step > available
        ),
        f"{n_steps} steps would take {at_peak:.0f} s at the peak rate (--plan_steps)": at_peak > _MAX_SECONDS,
    }
    applies = np.asarray(list(reasons.values()))
    if jax.process_count() > 1:  # measured rates differ between processes: the first decides for all
        applies = multihost_utils.broadcast_one_to_all(applies)
    return next((reason for reason, applied in zip(reasons, applies, strict=True) if applied), None)


def _time_steps(
    step: Callable[[TrainState, Any], tuple[TrainState, Any]], state: TrainState, batches: Any, steps: int
) -> float:
    """Return the median of seconds per step."""
    seconds = []
    for _ in range(steps + 1):  # the first warms up
        start = time.perf_counter()
        state, metrics = step(state, batches)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
