"""The platform that programs are compiled for: that of the devices here, unless a plan names another.

Chunk sizes, blocks and kernels are chosen while a program is traced, before a compiler says for what. A plan compiles
for devices that are not there (`compiling_for`); whatever chooses by platform asks `target`, not JAX's default backend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
