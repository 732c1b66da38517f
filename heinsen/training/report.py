"""What a run tells while it goes on: metrics.jsonl, TensorBoard, W&B, the console, traces, the loss plot."""

import contextlib
import dataclasses
import hashlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from heinsen.training.metrics import Console, MetricsLog, peak_flops_per_device, plot_loss, train_flops_per_token
from heinsen.training.optimizer import make_schedule
from heinsen.training.run import RunError, TrainConfig


class Reporter:
    """Rates and utilisation, and where they go. Without `writes` nothing is written: the process is not the first.

    Use as a context manager. Rates leave out what happens in `pause`.
    """

    def __init__(self, config: TrainConfig, workdir: Path, start_step: int, n_params: int, writes: bool):
        self._config, self._workdir, self._writes = config, workdir, writes
        self._schedule = make_schedule(config.optimizer, config.total_steps)
        self._flops_per_token = train_flops_per_token(n_params)
        self._peak_flops = (config.peak_flops or peak_flops_per_device()) * jax.device_count()
        self._spikes = Spikes(config.spike_sigmas) if config.spike_sigmas else None
        self._tracing = False
        self._wandb = _start_wandb(config, workdir) if writes and config.wandb_project else None
        self._log = MetricsLog(workdir, start_step) if writes else None
        self._console = Console(workdir.name, start_step, config.total_steps, writes)
        self._logged_step, self._logged_time, self._data_seconds = start_step, time.perf_counter(), 0.0

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_) -> None:
        self._console.close()
        if self._tracing:
            jax.profiler.stop_trace()
        if self._wandb is not None:
            self._wandb.finish()
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk: what made the run stop is the news
                self._log.close()
                plot_loss(self._workdir)

    def message(self, text: str) -> None:
        self._console.message(text)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._logged_time += time.perf_counter() - start

    def before(self, step: int) -> None:
        """To be called before a step starts."""
        traced = self._config.traced
        if traced is not None and step in traced and not self._tracing:
            jax.profiler.start_trace(str(self._workdir / "trace"))
            self._tracing = True

    def ends_trace(self, step: int) -> bool:
        """Whether the trace ends with this step, which must be reported before another begins."""
        return self._tracing and step == self._config.traced[-1]

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is done; `metrics` are the step's, as numbers, with the bits_per_byte and the updates before it."""
        self._console.update(step)
        if self.ends_trace(step):
            jax.profiler.stop_trace()
            self._tracing = False
            self.message(f"trace of steps {self._config.trace_steps} written to {self._workdir / 'trace'}")
        if self._spikes is not None and (spike := self._spikes.look(metrics["loss"])):
            self.message(f"loss spike at step {step}: {spike}, gradient norm {metrics['grad_norm']:.2f}")
        if step % self._config.log_every and step != self._config.total_steps:
            return
        now, c = time.perf_counter(), self._config
        seconds, self._logged_time = now - self._logged_time, now
        rate = (step - self._logged_step) * c.batch_size * c.sequence_length / seconds
        measured = {name: metrics[name] for name in ("loss", "bits_per_byte", "grad_norm", "param_norm", "skipped")} | {
            "learning_rate": float(self._schedule(metrics["updates"])),
            "tokens_per_second": rate,
            "mfu": rate * self._flops_per_token / self._peak_flops,
            "data_wait": self._data_seconds / seconds,
        }
        memory = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            measured["peak_device_bytes"] = memory["peak_bytes_in_use"]
        self._logged_step, self._data_seconds = step, 0.0
        self._write(step, measured)

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self._write(step, metrics)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {"tokens": step * self._config.batch_size * self._config.sequence_length, **metrics}
        if self._log is not None:
            self._log.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)
        self._console.report(step, metrics)


class Spikes:
    """Losses far above those of the last steps: more than so many of their standard deviations above their mean."""

    WINDOW, ENOUGH = 100, 20

    def __init__(self, sigmas: float):
        self._sigmas, self._last = sigmas, deque(maxlen=self.WINDOW)

    def look(self, loss: float) -> str | None:
        """What is to be said of this step's loss. Losses that are not finite are left out."""
        if not math.isfinite(loss):
            return None
        found = None
        if len(self._last) >= self.ENOUGH:
            mean, sigma = statistics.fmean(self._last), statistics.pstdev(self._last)
            if loss > mean + self._sigmas * sigma:
                found = f"{loss:.4f}, after {mean:.4f} +- {sigma:.4f} over {len(self._last)} steps"
        self._last.append(loss)
        return found


def _start_wandb(config: TrainConfig, workdir: Path):
    """A run in Weights & Biases that resuming goes on with; offline where its server cannot be reached."""
    try:
        import wandb
    except ImportError as error:
        raise RunError(
            "wandb_project is set, but wandb is not installed: pip install wandb, or leave it unset"
        ) from error
    options = dict(
        project=config.wandb_project,
        name=workdir.name,
        id=hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16],
        dir=str(workdir),
        config=dataclasses.asdict(config),
        resume="allow",
    )
    try:
        return wandb.init(**options, settings=wandb.Settings(init_timeout=30, silent=True))
    except wandb.errors.Error:
        os.environ["WANDB_MODE"] = "offline"
        return wandb.init(**options, settings=wandb.Settings(silent=True))
