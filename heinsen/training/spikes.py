"""Detection of spikes of the training loss."""

import math
import statistics
from collections import deque


class SpikeDetector:
    """Detects losses more than `sigmas` standard deviations above the mean of the last WINDOW steps."""

    WINDOW, MIN_LOSSES = 100, 20

    def __init__(self, sigmas: float) -> None:
        self._sigmas = sigmas
        self._losses: deque[float] = deque(maxlen=self.WINDOW)

    def check(self, loss: float) -> str | None:
        """Return a description if `loss` is a spike, and remember it. Ignores losses that are not finite."""
        if not math.isfinite(loss):
            return None
        description = None
        if len(self._losses) >= self.MIN_LOSSES:
            mean, sigma = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + self._sigmas * sigma:
                description = f"{loss:.4f}, after {mean:.4f} +- {sigma:.4f} over {len(self._losses)} steps"
        self._losses.append(loss)
        return description
