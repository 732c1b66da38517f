"""Write and read WORKDIR/metrics.jsonl, with the same numbers as TensorBoard events beside it."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from heinsen.files import write_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Log of a run's metrics: a JSON object per line with the step and its metrics, null for what is not finite.

    Opening the log drops entries after `start_step`, which a killed run wrote after its last checkpoint.
    """

    def __init__(self, workdir: Path, start_step: int) -> None:
        path = workdir / METRICS_FILE
        entries = [entry for entry in read_metrics(workdir) if entry["step"] <= start_step]
        write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        self._file = path.open("a")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # NaN is not JSON
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl, without lines that are damaged or cut short by a kill."""
    path = workdir / METRICS_FILE
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if line.endswith("\n"):
                entries.append(json.loads(line))
    return entries
