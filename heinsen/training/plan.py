"""What a run would take, from its compiled step: memory, time, device-hours. Nothing of a run is written."""

import dataclasses
import statistics
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from heinsen.parallel import keep_host_memory, make_mesh, place_batch, process_rows, split_batch, with_shardings
from heinsen.training.loop import as_batch, loss_of, passes
from heinsen.training.metrics import bytes_of, peak_flops_per_device, train_flops_per_token
from heinsen.training.optimizer import make_optimizer
from heinsen.training.run import TrainConfig, check_mesh
from heinsen.training.step import abstract_train_state, init_train_state, make_train_step

_PATIENCE = 300.0  # seconds that the timed steps may take


@dataclasses.dataclass(frozen=True)
class Plan:
    """bytes_* are per device, by XLA's analysis of the compiled step; seconds_per_step is None if it was not timed."""

    n_devices: int
    device: str
    mesh: dict[str, int]
    n_params: int
    batch_size: int
    sequence_length: int
    total_tokens: int
    total_steps: int
    bytes_state: int  # parameters and optimizer state
    bytes_step: int  # all that exists at once: state, batch, gradients, activations
    bytes_device: int | None  # of memory, where the backend tells
    peak_flops: float  # of all devices
    seconds_compiling: float
    seconds_per_step: float | None
    not_timed: str | None  # why not

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def flops_per_step(self) -> float:
        return train_flops_per_token(self.n_params) * self.tokens_per_step

    def __str__(self) -> str:
        size = lambda n: f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        rows = [
            ("devices", f"{self.n_devices} x {self.device}; {shape}"),
            ("parameters", f"{self.n_params:,}"),
            ("step", f"{self.batch_size} x {self.sequence_length} tokens = {self.tokens_per_step:,}"),
            ("run", f"{self.total_tokens:,} tokens, {self.total_steps:,} steps"),
            ("state a device", f"{size(self.bytes_state)} (parameters and optimizer)"),
            (
                "memory a device",
                f"{size(self.bytes_step)} in a step, by XLA's analysis"
                + (f", of {size(self.bytes_device)}" if self.bytes_device else ""),
            ),
            ("FLOPs a step", f"{self.flops_per_step:.3g} (6 N a token); peak {self.peak_flops:.3g} FLOP/s in all"),
            ("compiled in", f"{self.seconds_compiling:.0f} s"),
        ]
        if self.seconds_per_step is None:
            rows.append(("time", f"not measured: {self.not_timed}"))
            rates = [0.2, 0.4]
            seconds = [self.flops_per_step / (rate * self.peak_flops) for rate in rates]
            labels = [f"if MFU were {rate:.0%}" for rate in rates]
        else:
            seconds, labels = [self.seconds_per_step], ["measured"]
            mfu = self.flops_per_step / self.seconds_per_step / self.peak_flops
            rate = self.tokens_per_step / self.seconds_per_step
            rows.append(("time a step", f"{self.seconds_per_step:.3g} s, {rate:,.0f} tokens/s, MFU {mfu:.1%}"))
        for label, each in zip(labels, seconds, strict=True):
            hours = each * self.total_steps / 3600
            rows.append((label, f"{_duration(hours)} for the whole run, {hours * self.n_devices:,.1f} device-hours"))
        return "\n".join(f"{name:<16} {text}" for name, text in rows)


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


def plan(config: TrainConfig, steps: int) -> Plan:
    """Compile the step of a run on these devices, and time `steps` of it on random tokens (0: none).

    Nothing is timed where the step needs more memory than there is, or would take minutes at the device's peak rate.
    Raises MeshError.
    """
    keep_host_memory()
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    abstract = abstract_train_state(config.model, optimizer, mesh)
    n_windows = config.accumulation_steps * len(process_rows(mesh, config.sequences_per_pass))
    windows = n_windows, config.sequence_length + 1
    random = np.random.default_rng(0).integers(config.model.vocab_size, size=windows, dtype=np.int32)
    arrays = passes(config, random, 1, np.arange(n_windows))
    whole = lambda x: (x.shape[0], config.sequences_per_pass, x.shape[2])
    abstract_arrays = {name: jax.ShapeDtypeStruct(whole(x), x.dtype) for name, x in arrays.items()}
    abstract_batch = as_batch(config, with_shardings(abstract_arrays, split_batch(mesh, axis=1)))
    start = time.perf_counter()
    step = make_train_step(config.model, optimizer, mesh, loss_of(config.model))
    compiled = step.lower(abstract, abstract_batch).compile()
    seconds_compiling = time.perf_counter() - start

    on_device = lambda x: x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
    bytes_step = bytes_of(compiled)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak_flops = (config.peak_flops or peak_flops_per_device()) * jax.device_count()
    partial = Plan(
        n_devices=jax.device_count(),
        device=jax.devices()[0].device_kind,
        mesh=dict(mesh.shape),
        n_params=sum(x.size for x in jax.tree.leaves(abstract.params)),
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        total_tokens=config.total_tokens,
        total_steps=config.total_steps,
        bytes_state=sum(map(on_device, jax.tree.leaves(abstract))),
        bytes_step=bytes_step,
        bytes_device=stats.get("bytes_limit"),
        peak_flops=peak_flops,
        seconds_compiling=seconds_compiling,
        seconds_per_step=None,
        not_timed=None,
    )
    at_best = partial.flops_per_step / peak_flops * (steps + 1)
    reasons = {
        "--plan_steps=0": steps == 0,
        "it needs more memory than there is": partial.bytes_device is not None and bytes_step > partial.bytes_device,
        f"{steps + 1} steps would take {at_best:.0f} s at the peak rate (--plan_steps)": at_best > _PATIENCE,
    }
    verdict = np.asarray(list(reasons.values()))
    if jax.process_count() > 1:  # one for all: what is measured differs between them
        verdict = multihost_utils.broadcast_one_to_all(verdict)
    if reason := next((reason for reason, applies in zip(reasons, verdict, strict=True) if applies), None):
        return dataclasses.replace(partial, not_timed=reason)

    state = init_train_state(config.model, optimizer, config.seed, mesh)
    batch = as_batch(config, place_batch(mesh, arrays, axis=1))
    seconds = []
    for _ in range(steps + 1):  # the first to warm up
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return dataclasses.replace(partial, seconds_per_step=statistics.median(seconds[1:]))
