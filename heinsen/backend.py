"""The backend that programs are compiled for: that of the devices here, unless a plan names another.

Chunk sizes, blocks and kernels are chosen while a program is traced, before a compiler says for what. A plan compiles
for devices of other machines (`compiling_for`); whatever chooses by backend asks `current`, not JAX's default backend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_BACKEND: ContextVar[str | None] = ContextVar("backend", default=None)


def current() -> str:
    """The backend that is compiled for: "cpu", "gpu" or "tpu"."""
    return _BACKEND.get() or jax.default_backend()


@contextmanager
def compiling_for(backend: str) -> Iterator[None]:
    """Within the block, what is traced is for this backend. Functions that were traced before keep what they have."""
    token = _BACKEND.set(backend)
    try:
        yield
    finally:
        _BACKEND.reset(token)
