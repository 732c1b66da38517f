"""Errors of devices and of other processes, with what to do about them."""

import contextlib
import re
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from heinsen.errors import HeinsenError
from heinsen.parallel import n_batch_parts
from heinsen.training.config import TrainConfig
from heinsen.training.step import TrainState
from heinsen.training.throughput import available_bytes, bytes_per_device, format_bytes


class DeviceError(HeinsenError, RuntimeError):
    """A device ran out of memory or failed, or another process of the run was lost."""


@contextlib.contextmanager
def explain_device_errors() -> Iterator[None]:
    """Raise DeviceError with a remedy where the block raises an error of JAX's runtime."""
    try:
        yield
    except MemoryError as error:  # of NumPy
        raise DeviceError(
            f"out of memory: {error}. Make the batch smaller, or raise --config.accumulation_steps"
        ) from error
    except Exception as error:
        if not is_device_error(error):
            raise
        raise DeviceError(_explain(error)) from error


def is_device_error(error: BaseException | None) -> bool:
    """Return whether an error is of JAX's runtime. That of a failed collective may reach Python as a ValueError."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    is_status = type(error) is ValueError and re.match("[A-Z_]{5,}: ", str(error)) is not None
    return is_status and jax.process_count() > 1


def _explain(error: Exception) -> str:
    text = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return (
            f"out of device memory: {text}. Raise --config.accumulation_steps, set --config.model.remat=full, or split "
            "the model with --config.mesh.fsdp; --plan reports how much a step needs"
        )
    if jax.process_count() > 1:
        return f"another process of the run failed or was lost: {text}. Restart all of them to resume the run"
    return text


def check_memory(config: TrainConfig, mesh: Mesh, state: TrainState) -> None:
    """Raise DeviceError if a step needs much more memory than a device has: XLA would abort, or the machine hang.

    It needs at least the state, and the residual stream of its tokens. --plan reports all of it.

    Args:
      state: the shapes and shardings of what a step updates.
    """
    available = available_bytes()
    n_state = bytes_per_device(state)
    n_tokens = config.sequences_per_pass * config.sequence_length // (n_batch_parts(mesh) * mesh.shape["sequence"])
    n_step = n_state + 4 * n_tokens * config.model.d_model
    if available is not None and n_step > available:
        raise DeviceError(
            f"out of memory: a step needs more than {format_bytes(n_step)} per device, {format_bytes(n_state)} of it "
            f"for parameters and optimizer, and there are {format_bytes(available)}. Make the model or the batch "
            "smaller, raise --config.accumulation_steps, or split it over more devices (docs/scaling.md)"
        )
