"""Errors of devices and of other processes, with what to do about them."""

import contextlib
from collections.abc import Iterator

import jax

from heinsen.errors import HeinsenError


class DeviceError(HeinsenError, RuntimeError):
    """A device ran out of memory or failed, or another process of the run was lost."""


@contextlib.contextmanager
def explain_device_errors() -> Iterator[None]:
    """Raise DeviceError with a remedy where the block raises JaxRuntimeError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(_explain(error)) from error


def _explain(error: jax.errors.JaxRuntimeError) -> str:
    text = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return (
            f"out of device memory: {text}. Raise --config.accumulation_steps, set --config.model.remat=full, or split "
            "the model with --config.mesh.fsdp; --plan reports how much a step needs"
        )
    if jax.process_count() > 1:
        return f"another process of the run failed or was lost: {text}. Restart all of them to resume the run"
    return text
