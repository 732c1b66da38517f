"""The platform that programs are compiled for: that of the devices here, unless a plan names another.

Chunk sizes, blocks and kernels are chosen while a program is traced, before a compiler says for what. A plan compiles
for devices that are not there (`compiling_for`); whatever chooses by platform asks `target`, not JAX's default backend.
What is compiled here is kept for the next process (`keep_compilations`).
"""

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import jax

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)


def target() -> str:
    """The platform that is compiled for: "cpu", "gpu" or "tpu"."""
    return _TARGET.get() or jax.default_backend()


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Within the block, what is traced is for this platform. Functions that were traced before keep what they have."""
    token = _TARGET.set(platform)
    try:
        yield
    finally:
        _TARGET.reset(token)


def keep_compilations() -> None:
    """Keep compiled programs in ~/.cache/heinsen for the next process, unless JAX_COMPILATION_CACHE_DIR names a folder.

    2 GiB at most, the oldest go first. Programs for a CPU may use all that it can do: each kind of CPU has a folder of
    its own. JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heinsen" / "compiled" / _describe_cpu()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written: compile each time
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
