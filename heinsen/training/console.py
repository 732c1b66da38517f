"""Progress of a training run on stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping

from tqdm import tqdm

from heinsen.training.metrics import SAMPLE

# (metric, label, format) in the order shown.
_COLUMNS = (
    ("loss", "loss", ".4f"),
    ("validation_loss", "validation loss", ".4f"),
    ("bits_per_byte", "bits/byte", ".3f"),
    ("validation_bits_per_byte", "bits/byte", ".3f"),
    ("grad_norm", "grad norm", ".2f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
)


class Console:
    """Progress of a run on stderr: on a terminal a bar with loss, rate and ETA, in a log file lines of them.

    Without `enabled` it prints nothing.
    """

    def __init__(self, name: str, start_step: int, total_steps: int, enabled: bool) -> None:
        self._name, self._start_step, self._total_steps, self._enabled = name, start_step, total_steps, enabled
        self._start_time = time.perf_counter()
        self._bar: tqdm | None = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, desc=name, unit="step", dynamic_ncols=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block's time out of the ETA."""
        start = time.perf_counter()
        yield
        self._start_time += time.perf_counter() - start

    def update(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Show a step's metrics, and the sample."""
        text = "  ".join(f"{label} {metrics[name]:{form}}" for name, label, form in _COLUMNS if name in metrics)
        if self._bar is not None and "loss" in metrics:
            self._bar.set_postfix_str(text)
        elif self._enabled:
            elapsed = time.perf_counter() - self._start_time
            eta = elapsed / max(step - self._start_step, 1) * (self._total_steps - step)
            self.message(f"{self._name} step {step}/{self._total_steps}  {text}  ETA {tqdm.format_interval(eta)}")
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
