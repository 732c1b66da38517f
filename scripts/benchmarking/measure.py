"""The benchmarks' common part: timing, memory, the machine, and the results that they write."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from heinsen.errors import InputError
from heinsen.files import make_folder, write_atomically
from heinsen.host import return_freed_memory

IMPLEMENTATIONS = ("chunked", "pallas", "scan", "reference")
DTYPES = ("float32", "bfloat16")
_WARM_UP = 0.3  # seconds

Name = TypeVar("Name")


def check_dtypes(dtypes: Sequence[str]) -> None:
    """Raise InputError if one is not of DTYPES."""
    if unknown := set(dtypes) - {*DTYPES}:
        raise InputError(f"--dtypes={','.join(sorted(unknown))}: choose {' or '.join(DTYPES)}")


# ---- time and memory -----------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def warm_up(call: Callable[[], Any]) -> None:
    """Repeat a call for a while: the caches hold other data, and on some machines sleeping threads wake up slowly."""
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_UP:
        call()


def time_in_turn(calls: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, list[float]]:
    """Return the seconds of so many calls of each. They take turns, because the machine's speed varies."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            warm_up(call)
            times[name].append(seconds(call))
    return times


def milliseconds(times: list[float]) -> float:
    """Return the median of seconds in milliseconds."""
    return 1e3 * statistics.median(times)


def free_memory() -> int | None:
    """Return how many bytes can still be allocated on the device, or None if the backend does not say."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if jax.default_backend() == "cpu":
        return_freed_memory()
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# ---- the machine ---------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the name of the device, for a CPU with the number of cores, and {package: version} of what matters."""
    device, found = jax.devices()[0], {}
    name = device.device_kind
    if device.platform == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        model = models[0] if models else platform.processor() or platform.machine()
        name = f"{len(os.sched_getaffinity(0))} cores of {model}"
    for package in ("jax", "jaxlib", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return dict(device=name, versions=found)


def describe_machine(results: Mapping[str, Any]) -> str:
    """Return what results have of `machine`, in words."""
    return "; ".join([results["device"], ", ".join(f"{name} {x}" for name, x in results["versions"].items())])


# ---- progress and results ------------------------------------------------------------------------


def tell(line: str) -> None:
    """Show how far a benchmark is, on stderr."""
    print(line, file=sys.stderr, flush=True)


def write_results(out: Path, results: Mapping[str, Any]) -> None:
    """Write OUT/results.json: after each figure, so that a benchmark that is stopped leaves what it has found."""
    make_folder(out)
    record = {"command": f"python {shlex.join(sys.argv)}", **results}
    write_atomically(out / "results.json", json.dumps(record, indent=1) + "\n")
