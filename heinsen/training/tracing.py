"""Traces of chosen training steps by jax.profiler."""

from pathlib import Path

import jax


class StepTracer:
    """Traces a range of steps into a folder; None traces nothing."""

    def __init__(self, steps: range | None, folder: Path) -> None:
        self._steps, self._folder, self._tracing = steps, folder, False

    def start_step(self, step: int) -> None:
        """Call before each step."""
        if self._steps is not None and step in self._steps and not self._tracing:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def ends_with(self, step: int) -> bool:
        """Return whether `step` is the last one of the running trace; the next must not begin before it ends."""
        return self._tracing and self._steps is not None and step == self._steps[-1]

    def stop(self) -> None:
        """Write the trace, if one is running."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
