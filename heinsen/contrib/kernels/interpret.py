"""Kernels in JAX's interpret modes, on CPUs: for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PARAMS: ContextVar[Any] = ContextVar("params", default=None)


def params() -> Any:
    """The parameters of the interpret mode in which kernels run; None: they are compiled for the device."""
    return _PARAMS.get()


@contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Within the block, kernels are traced for an interpret mode, by its InterpretParams or InterpretGPUParams."""
    token = _PARAMS.set(params)
    try:
        yield
    finally:
        _PARAMS.reset(token)
