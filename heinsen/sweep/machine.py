"""The cores and GPUs of this machine, and their division among runs."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def divide(items: Sequence[T], parts: int) -> list[list[T]]:
    """Return consecutive parts whose sizes differ by at most one. Fewer items than parts are reused in turn."""
    if len(items) < parts:
        return [[items[i % len(items)]] for i in range(parts)] if items else [[] for _ in range(parts)]
    ends = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
