"""Requirements of a run, from its compiled step: memory, time, device-hours. Writes nothing to a run folder."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from heinsen.chips import Chip, chip_of
from heinsen.host import keep_host_memory
from heinsen.models import ModelConfig
from heinsen.parallel import make_mesh, place_batch, process_rows, split_batch, with_shardings
from heinsen.plan.report import Plan
from heinsen.plan.targets import Target, find_target
from heinsen.training.config import TrainConfig, check_mesh
from heinsen.training.data import make_microbatches
from heinsen.training.devices import (
    available_bytes,
    bytes_per_device,
    compiled_bytes,
    explain_device_errors,
    peak_flops_per_device,
)
from heinsen.training.optimizer import make_optimizer
from heinsen.training.stages import Stage, stages_of
from heinsen.training.step import TrainState, abstract_train_state, init_train_state, make_train_step

_MAX_SECONDS = 300.0  # for the timed steps
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def plan_stages(
    config: TrainConfig, steps: int, target: str | None = None, peak_flops: float | None = None
) -> list[Plan]:
    """Return the `plan` of each stage of a run, in order."""
    if target is not None:
        find_target(target).devices()  # before `stages_of` starts the devices here, which would hide the compilers
    return [plan(config, steps, target, peak_flops, stage) for stage in stages_of(config)]


def plan(
    config: TrainConfig,
    steps: int,
    target: str | None = None,
    peak_flops: float | None = None,
    stage: Stage | None = None,
) -> Plan:
    """Plan a run on the devices here, or on the target, a machine that need not exist (`targets.find_target`).

    Compiles the step; on the devices here also times `steps` of it on random tokens (0: none), unless it needs more
    memory than there is, or would take minutes at the devices' peak rate. peak_flops: that rate in FLOP/s per device,
    None: `chips` has it, or it is measured. stage: one of the run's, None: the last. Raises MeshError, DeviceError,
    TargetError.
    """
    stage = stage or stages_of(config)[-1]
    if target is None:
        return _plan_here(config, stage, steps, peak_flops)
    return _plan_target(config, stage, find_target(target), peak_flops)


@explain_device_errors()
def _plan_here(config: TrainConfig, stage: Stage, steps: int, peak_flops: float | None) -> Plan:
    keep_host_memory()
    mesh = make_mesh(config.mesh)
    arrays = _random_batches(config, len(process_rows(mesh, config.sequences_per_microbatch)))
    step = _Step(config, stage, mesh, arrays)
    start = time.perf_counter()
    compiled = step.compile()
    memory = jax.local_devices()[0].memory_stats() or {}
    chip = chip_of(jax.devices()[0].device_kind)
    untimed = dataclasses.replace(
        step.plan_of(compiled, chip, peak_flops or peak_flops_per_device()),
        bytes_device=memory.get("bytes_limit"),
        seconds_compiling=time.perf_counter() - start,
    )
    if reason := _reason_not_to_time(untimed, steps):
        return dataclasses.replace(untimed, not_timed=reason)
    state = init_train_state(config.model, step.optimizer, config.seed, mesh)
    seconds = _time_steps(compiled, state, place_batch(mesh, arrays, axis=1), steps)
    return dataclasses.replace(untimed, seconds_per_step=seconds)


@explain_device_errors()
def _plan_target(config: TrainConfig, stage: Stage, target: Target, peak_flops: float | None) -> Plan:
    devices = target.devices()
    with target.compiling():
        mesh = make_mesh(config.mesh, devices)
        step = _Step(config, stage, mesh, _random_batches(config, config.sequences_per_microbatch))
        start = time.perf_counter()
        try:
            compiled, overflow = step.compile(), None
        except jax.errors.JaxRuntimeError as error:
            compiled, overflow = None, find_overflow(str(error))
            if overflow is None:
                raise
        planned = step.plan_of(compiled, target.chip, peak_flops or target.chip.bfloat16)
    planned = dataclasses.replace(
        planned, target=target.name, bytes_device=target.memory, seconds_compiling=time.perf_counter() - start
    )
    if overflow is not None:
        planned = dataclasses.replace(planned, bytes_step=overflow[0], bytes_device=overflow[1])
    return planned


_SIZE = r"([\d.]+)([KMGT]?)"
_OVERFLOWS = (
    rf"Used {_SIZE} of {_SIZE} hbm",
    rf"total memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
)


def find_overflow(message: str) -> tuple[int, int] | None:
    """Bytes that a step needs at least and that there are, of a compiler's error; None if it says something else."""
    match = next(filter(None, (re.search(pattern, message) for pattern in _OVERFLOWS)), None)
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2]]), int(float(match[3]) * _UNITS[match[4]])


class _Step:
    """The step of a stage on a mesh, with the shapes of its arguments. Raises MeshError if they do not fit it.

    arrays: this process's rows of the batches.
    """

    def __init__(self, config: TrainConfig, stage: Stage, mesh: Mesh, arrays: Any) -> None:
        check_mesh(config, mesh)
        self.config, self.stage, self.mesh = config, stage, mesh
        self.optimizer = make_optimizer(stage.optimizer, stage.n_steps)
        self.state = abstract_train_state(config.model, self.optimizer, mesh)
        global_shape = lambda x: (x.shape[0], config.sequences_per_microbatch, *x.shape[2:])
        batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(global_shape(x), x.dtype), arrays)
        self.batches = with_shardings(batches, split_batch(mesh, axis=1))

    def compile(self) -> jax.stages.Compiled:
        step = make_train_step(self.config.model, self.optimizer, self.mesh, self.stage.loss, self.stage.trained)
        return step.lower(self.state, self.batches).compile()

    def plan_of(self, compiled: jax.stages.Compiled | None, chip: Chip | None, peak_flops: float) -> Plan:
        """The plan without times; compiled: None if the step does not fit."""
        config, n_devices = self.config, self.mesh.size
        costs = None
        if compiled is not None and chip is not None:
            from heinsen.contrib.hlo_cost import count_costs  # the only use of this part of contrib in the core

            costs = count_costs(compiled.as_text() or "", chip, n_devices)
        return Plan(
            n_devices=n_devices,
            device=self.mesh.devices.flat[0].device_kind,
            mesh=dict(self.mesh.shape),
            n_params=sum(x.size for x in jax.tree.leaves(self.state.params)),
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            total_tokens=min(config.total_tokens, self.stage.n_steps * config.tokens_per_step),
            total_steps=self.stage.n_steps,
            stage=self.stage.name,
            bytes_state=bytes_per_device(self.state),
            bytes_step=0 if compiled is None else compiled_bytes(compiled),
            peak_flops=peak_flops * n_devices,
            costs=costs,
            notes=find_notes(config.model),
        )


def find_notes(model: ModelConfig) -> tuple[str, ...]:
    """Return what slows a model on the backend that is compiled for, and what to compare it with."""
    return tuple(dict.fromkeys(note for mixer in model.mixers if (note := mixer.performance_note())))


def _random_batches(config: TrainConfig, n_rows: int) -> Any:
    """Return batches of random tokens, of n_rows per microbatch."""
    rows = np.arange(config.accumulation_steps * n_rows)
    shape = rows.size, config.sequence_length + 1
    windows = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    return make_microbatches(config, windows, 1, rows)


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
