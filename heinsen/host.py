"""Things that the machine keeps for later: compiled programs for the next process, freed memory for the next step."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
from pathlib import Path

import jax


def keep_compilations() -> None:
    """Keep compiled programs in ~/.cache/heinsen for the next process, unless JAX_COMPILATION_CACHE_DIR names a folder.

    2 GiB at most, the oldest go first. Programs for a CPU may use all that it can do: each kind of CPU has a folder of
    its own. JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heinsen" / "compiled"
        cache /= _describe_cpu()
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a home that cannot be written, or none: compile each time
        return
    if os.access(cache, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_compilation_cache_max_size", 2 * 2**30)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _describe_cpu() -> str:
    """Return a name for the kind of CPU, by what it can do."""
    features = platform.machine()
    with contextlib.suppress(OSError):
        features += "".join(re.findall(r"^(?:flags|Features)\b.*", Path("/proc/cpuinfo").read_text(), re.M)[:1])
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def keep_host_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the kernel, on a CPU backend.

    XLA allocates a step's temporaries anew each time, and fresh pages cost a third of a small model's step. No-op on
    other backends and C libraries.
    """
    if jax.default_backend() != "cpu":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_top_pad, 64 << 20)


def return_freed_memory() -> None:
    """Return to the kernel what glibc has kept (`keep_host_memory`). No-op with other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
