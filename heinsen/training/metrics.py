"""What a run reports: metrics.jsonl, TensorBoard events, the console, the loss plot; rates and utilisation."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tensorboardX import SummaryWriter
from tqdm import tqdm

from heinsen.files import write_atomically

METRICS_FILE = "metrics.jsonl"

# Dense bfloat16 multiply-add rates by jax's device_kind, from the vendors' data sheets, in FLOP/s.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


class MetricsLog:
    """Appends to WORKDIR/metrics.jsonl and TensorBoard events; entries past `start_step` (of a killed run) are dropped.

    Each line is one object: step, tokens and the metrics of that step, null for what was not finite.
    """

    def __init__(self, workdir: Path, start_step: int):
        path = workdir / METRICS_FILE
        kept = [entry for entry in read_metrics(workdir) if entry["step"] <= start_step]
        write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = path.open("a")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        whole = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # NaN is not JSON
        self._file.write(json.dumps({"step": step, **whole}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; lines cut short by a kill or damaged are left out."""
    path = workdir / METRICS_FILE
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if line.endswith("\n"):
                entries.append(json.loads(line))
    return entries


class Console:
    """Progress of a run on stderr: a bar with loss, rate and ETA on a terminal, lines in a log file."""

    def __init__(self, name: str, start_step: int, total_steps: int, enabled: bool):
        self._name, self._start_step, self._total_steps, self._enabled = name, start_step, total_steps, enabled
        self._start_time = time.perf_counter()
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, desc=name, unit="step", dynamic_ncols=True)

    def update(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        text = "  ".join(f"{label} {metrics[name]:{form}}" for name, label, form in _SHOWN if name in metrics)
        if self._bar is not None and "loss" in metrics:
            self._bar.set_postfix_str(text)
        elif self._enabled:
            elapsed = time.perf_counter() - self._start_time
            eta = elapsed / max(step - self._start_step, 1) * (self._total_steps - step)
            self.message(f"{self._name} step {step}/{self._total_steps}  {text}  ETA {tqdm.format_interval(eta)}")

    def message(self, text: str) -> None:
        if self._enabled:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_SHOWN = (
    ("loss", "loss", ".4f"),
    ("validation_loss", "validation loss", ".4f"),
    ("bits_per_byte", "bits/byte", ".3f"),
    ("validation_bits_per_byte", "bits/byte", ".3f"),
    ("grad_norm", "grad norm", ".2f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
)


def train_flops_per_token(n_params: int) -> float:
    """6 N: two for the forward multiply-add, four for the backward; N counts the tied embedding once (as the head)."""
    return 6.0 * n_params


def bytes_of(compiled: jax.stages.Compiled) -> int:
    """What exists at once on a device while a compiled function runs, by XLA's analysis, arguments included."""
    memory = compiled.memory_analysis()
    in_and_out = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return in_and_out + memory.temp_size_in_bytes


def peak_flops_per_device() -> float:
    """The device's matmul rate in FLOP/s: from the table, else a measured float32 product of 2048 x 2048 matrices."""
    kind = jax.devices()[0].device_kind
    # The longest name first: "TPU v5 lite" is not a "TPU v5".
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if kind.startswith(name):
            return PEAK_FLOPS[name]
    x = jnp.ones((2048, 2048), jnp.float32)
    matmul = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        matmul(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    # Simulated devices share one machine, and one product uses all of it.
    return 2 * 2048**3 / min(seconds) / jax.local_device_count()


def plot_loss(workdir: Path) -> Path:
    """WORKDIR/plots/loss.png: training and validation loss by tokens, from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = read_metrics(workdir)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = [(entry["tokens"], entry[name]) for entry in entries if entry.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{label}: {points[-1][1]:.3f}", lw=1, ms=4)
            axes.legend()
    axes.set(title=workdir.name, xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    path = workdir / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
