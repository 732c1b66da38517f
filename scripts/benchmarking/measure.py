"""What the benchmarks share: timing, memory, the machine, and the files that they write."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from heinsen.distributed import return_freed_memory
from heinsen.errors import InputError
from heinsen.files import write_atomically

_WARM_UP = 0.3  # seconds


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


def free_memory() -> int | None:
    """Return how many bytes can still be allocated on the device, or None if the backend does not say."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if jax.default_backend() == "cpu":
        return_freed_memory()
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def device_name() -> str:
    """Return the name of the device, for a CPU with the number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def describe_device() -> dict[str, Any]:
    """Return the platform, the devices' name and number, and the bytes that one of them has; None: it does not say."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return dict(platform=jax.default_backend(), device=device_name(), count=jax.device_count(), memory=memory)


def versions() -> dict[str, str]:
    """Return {package: version} of the installed packages that matter here."""
    found = {}
    for package in ("jax", "jaxlib", "torch", "flash-linear-attention"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def parse_numbers(flag: str, texts: list[str], at_most: int | None = None) -> list[int]:
    """Return the positive integers of a list flag. Raises InputError."""
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise InputError(f"--{flag}: {text!r} is not a number above 0; expected e.g. --{flag}=16,64")
        if at_most is not None and int(text) > at_most:
            raise InputError(f"--{flag}: {text} is more than {at_most}")
    return [int(text) for text in texts]


def write_results(out: Path, results: dict[str, Any]) -> Path:
    """Write OUT/results.json."""
    path = out / "results.json"
    write_atomically(path, json.dumps(results, indent=1) + "\n")
    return path
