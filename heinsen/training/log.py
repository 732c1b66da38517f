"""Reports of a run in progress: metrics to files and services, progress and messages to stderr."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import jax
from tqdm import tqdm

from heinsen.evaluation.loss import bits_per_byte
from heinsen.training.config import TrainConfig
from heinsen.training.devices import peak_flops_per_device, train_flops_per_token
from heinsen.training.folder import RunError
from heinsen.training.metrics import SAMPLE, MetricsLog, WandbLog
from heinsen.training.optimizer import make_schedule
from heinsen.training.plots import plot_run
from heinsen.training.stages import Stage

# (metric, label, format) in the order shown.
_COLUMNS = (
    ("loss", "loss", ".4f"),
    ("distance", "distance", ".4f"),
    ("validation_loss", "validation loss", ".4f"),
    ("bits_per_byte", "bits/byte", ".3f"),
    ("validation_bits_per_byte", "bits/byte", ".3f"),
    ("grad_norm", "grad norm", ".2f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
)


class Console:
    """Progress of a run on stderr: loss, rate and ETA, as a bar on a terminal and as lines in a log file.

    The ETA is that of the steps alone, without what `pause` leaves out. Without `enabled` it prints nothing.
    """

    def __init__(self, name: str, start_step: int, total_steps: int, enabled: bool) -> None:
        self._name, self._start_step, self._total_steps, self._enabled = name, start_step, total_steps, enabled
        self._stage = ""
        self._start_time = time.perf_counter()
        self._bar: tqdm | None = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                desc=name,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",  # without tqdm's ETA, which knows no pauses
                dynamic_ncols=True,
            )

    @property
    def seconds(self) -> float:
        """The time since it was made, without pauses."""
        return time.perf_counter() - self._start_time

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block's time out of `seconds`."""
        start = time.perf_counter()
        yield
        self._start_time += time.perf_counter() - start

    def start_stage(self, name: str) -> None:
        """Name the stage that begins, if it has a name."""
        self._stage = f"{name} " if name else ""
        if self._bar is not None:
            self._bar.set_description_str(f"{self._name} {self._stage}".strip())

    def update(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Show a step's metrics, and the sample."""
        shown = [f"{label} {metrics[name]:{form}}" for name, label, form in _COLUMNS if name in metrics]
        eta = self.seconds / max(step - self._start_step, 1) * (self._total_steps - step)
        text = "  ".join([*shown, f"ETA {tqdm.format_interval(eta)}"])
        if self._bar is not None and not any(name.startswith("validation") for name in metrics):
            self._bar.set_postfix_str(text)
        else:
            self.message(f"{self._name} {self._stage}step {step}/{self._total_steps}  {text}")
        if SAMPLE in metrics:
            self.message(f"a sample:\n{metrics[SAMPLE]}\n")

    def message(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._enabled:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class LossMean:
    """The mean of the losses since the last log, without those that are not finite.

    Args:
      state: of the mean that is continued, as [sum, count].
    """

    def __init__(self, state: Sequence[float] = (0.0, 0)) -> None:
        self._sum, self._count = state

    @property
    def state(self) -> list[float]:
        return [self._sum, self._count]

    def add(self, loss: float) -> None:
        if math.isfinite(loss):
            self._sum, self._count = self._sum + loss, self._count + 1

    def take(self) -> float:
        """Return the mean, NaN if there is none, and begin anew."""
        mean = self._sum / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        return mean


class Reporter:
    """Adds rates to a run's metrics and sends them to its logs; use as a context manager.

    Without `writes` (in all processes but the first) it writes and prints nothing. Rates leave out time in `pause` and
    in `compiling`.

    Args:
      losses: the mean loss, as it was at `start_step`.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: Path,
        start_step: int,
        n_params: int,
        bytes_per_token: float,
        losses: LossMean,
        writes: bool,
    ) -> None:
        self._config, self._workdir, self._writes = config, workdir, writes
        self._bytes_per_token, self.losses = bytes_per_token, losses
        self._flops_per_token = train_flops_per_token(n_params)
        self._peak_flops = peak_flops_per_device() * jax.device_count()
        self._tracing = False
        self._logs: list[MetricsLog | WandbLog] = []
        with contextlib.ExitStack() as opened:
            if writes and config.wandb_project:  # it may be missing: found out before metrics.jsonl changes
                self._logs.append(opened.enter_context(contextlib.closing(WandbLog(config, workdir))))
            if writes:
                self._logs.insert(0, opened.enter_context(contextlib.closing(MetricsLog(workdir, start_step))))
            self._opened = opened.pop_all()
        self._console = Console(workdir.name, start_step, config.total_steps, writes)
        self._measured_step, self._measured_seconds, self._data_seconds = start_step, self._console.seconds, 0.0

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self._console.close()
        self._stop_trace()
        unless_it_fails = contextlib.suppress(OSError, RunError)  # a full disk: report what ended the run instead
        with unless_it_fails:
            self._opened.close()
        with unless_it_fails:
            if self._writes:
                plot_run(self._workdir)

    def message(self, text: str) -> None:
        self._console.message(text)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def pause(self) -> AbstractContextManager[None]:
        """Leave the block's time out of the rates and the ETA."""
        return self._console.pause()

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Tell that a program is being compiled, and how long it took."""
        self.message(f"compiling the {what} ...")
        start = time.perf_counter()
        with self.pause():
            yield
        self.message(f"compiled the {what} in {time.perf_counter() - start:.1f} s")

    def start_stage(self, stage: Stage) -> None:
        """Call before the steps of each stage."""
        self._stage, self._schedule = stage, make_schedule(stage.optimizer, stage.n_steps)
        self._console.start_stage(stage.name)
        if stage.name:
            what = "everything" if stage.trained is None else "only what the teacher lacks"
            self.message(f"stage {stage.name}, steps {stage.first_step:,} to {stage.last_step:,}: {what} learns")

    def start_step(self, step: int) -> None:
        """Call before each step."""
        traced = self._config.traced
        if traced is not None and step in traced and not self._tracing:
            jax.profiler.start_trace(str(self._workdir / "trace"))
            self._tracing = True

    def ends_trace(self, step: int) -> bool:
        """Return whether a trace ends with this step, which must be reported before the next one starts."""
        traced = self._config.traced
        return self._tracing and traced is not None and step == traced[-1]

    def _stop_trace(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def report_step(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Report a step that is done.

        `metrics` are those of `make_train_step` as numbers, and "skips", whether the step changed nothing. The loss
        that is logged is the mean since the last log.
        """
        self.losses.add(metrics["loss"])
        self._console.update(step)
        if self.ends_trace(step):
            self._stop_trace()
            self.message(f"trace of steps {self._config.trace_steps} written to {self._workdir / 'trace'}")
        stage = self._stage
        if step % self._config.log_every and step != stage.last_step:
            return
        measured = {stage.loss_name: self.losses.take()} | self._measure_rates(step)
        if stage.loss_name == "loss":
            measured["bits_per_byte"] = bits_per_byte(measured["loss"], self._bytes_per_token)
            measured["mfu"] = measured["tokens_per_second"] * self._flops_per_token / self._peak_flops
        measured |= {name: x for name, x in metrics.items() if name not in ("loss", "skips")}
        n_updates = step - stage.first_step - metrics["skipped"] + metrics["skips"]  # before the step
        measured["learning_rate"] = float(self._schedule(n_updates))
        memory = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            measured["peak_device_bytes"] = memory["peak_bytes_in_use"]
        self.write(step, measured)

    def _measure_rates(self, step: int) -> dict[str, float]:
        """Return tokens/s and the share of time spent waiting for data, since the last call."""
        now = self._console.seconds
        seconds = now - self._measured_seconds
        rate = (step - self._measured_step) * self._config.tokens_per_step / seconds
        rates = {
            "tokens_per_second": rate,
            "data_wait": self._data_seconds / seconds,
        }
        self._measured_step, self._measured_seconds, self._data_seconds = step, now, 0.0
        return rates

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        metrics = {"tokens": step * self._config.tokens_per_step, **metrics}
        for log in self._logs:
            log.write(step, metrics)
        self._console.report(step, metrics)
