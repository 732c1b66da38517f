"""The devices of a run: memory, peak rate, options of their compiler, and their errors with what to do about them."""

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from heinsen import backend
from heinsen.chips import chip_of
from heinsen.errors import HeinsenError, InputError
from heinsen.parallel import n_batch_parts
from heinsen.quantities import format_bytes
from heinsen.training.config import TrainConfig

# ---- memory ----------------------------------------------------------------------------------


def bytes_per_device(arrays: Any) -> int:
    """Return the memory per device of a tree of arrays, or of their shapes, by their shardings."""
    n_bytes = lambda x: x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    return sum(map(n_bytes, jax.tree.leaves(arrays)))


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak memory per device of a compiled function by XLA's analysis, its arguments included."""
    memory: Any = compiled.memory_analysis()
    in_and_out = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return in_and_out + memory.temp_size_in_bytes


def available_bytes() -> int | None:
    """Return the memory of one device, None if it is not known. A CPU's devices share the machine's equally."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def check_memory(config: TrainConfig, mesh: Mesh, state: Any) -> None:
    """Raise DeviceError if a step needs much more memory than a device has: XLA would abort, or the machine hang.

    It needs at least the state, and the residual stream of its tokens. --plan reports all of it.

    Args:
      state: the shapes and shardings of the TrainState that a step updates.
    """
    available = available_bytes()
    n_state = bytes_per_device(state)
    n_tokens = config.sequences_per_microbatch * config.sequence_length
    n_tokens //= n_batch_parts(mesh) * mesh.shape["sequence"]
    n_step = n_state + 4 * n_tokens * config.model.d_model
    if available is not None and n_step > available:
        raise DeviceError(
            f"out of memory: a step needs more than {format_bytes(n_step)} per device, {format_bytes(n_state)} of it "
            f"for parameters and optimizer, and there are {format_bytes(available)}. Make the model or the batch "
            "smaller, raise --config.accumulation_steps, or split it over more devices (docs/scaling.md)"
        )


# ---- rates -----------------------------------------------------------------------------------


def train_flops_per_token(n_params: int) -> float:
    """Return 6 N: two FLOPs per parameter forward, four backward. N counts the tied embedding once (as the head)."""
    return 6.0 * n_params


def peak_flops_per_device() -> float:
    """Return the device's bfloat16 matmul rate in FLOP/s if its chip is known, else a measured rate, of float32."""
    chip = chip_of(jax.devices()[0].device_kind)
    return _measure_matmul() if chip is None else chip.bfloat16


@functools.cache
def _measure_matmul() -> float:
    n = 1024
    x = jnp.ones((n, n), jnp.float32)
    matmul = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        matmul(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    # Simulated devices share one machine, and one matmul uses all of it.
    return 2 * n**3 / min(seconds) / jax.local_device_count()


# ---- options of the compiler -----------------------------------------------------------------

OPTIONS_SWITCH = "HEINSEN_XLA_OPTIONS"  # an environment variable: 0 turns the options off

# XLA's options for the training step on GPUs. Two more that the field sets are XLA's own defaults: the latency hiding
# scheduler, and command buffers (CUDA graphs) of fusions, matrix products and cuDNN's calls.
_GPU_OPTIONS: dict[str, bool | str] = {
    # A loop, such as that over the layers, takes two turns at a time, each with buffers of its own: less of what it
    # carries is copied. By XLA's compiler a step of the paper's model has 3% fewer kernels, with fused ones no fewer.
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def compiler_options() -> dict[str, bool | str]:
    """Return XLA's options for the training step on the backend that is compiled for: none but on GPUs.

    Options that XLA_FLAGS names, and those that this version of XLA does not have, are left out. Raises InputError if
    HEINSEN_XLA_OPTIONS is neither 0 nor 1.
    """
    switch = os.environ.get(OPTIONS_SWITCH, "1")
    if switch not in ("0", "1"):
        raise InputError(f"{OPTIONS_SWITCH}={switch}: set it to 0 to leave XLA's options as they are, or remove it")
    if switch == "0" or backend.current() != "gpu":
        return {}
    named = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in _GPU_OPTIONS.items() if name not in named and _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: bool | str) -> bool:
    """Return whether this XLA has an option: it refuses to compile anything with one that it does not know."""
    try:
        jax.jit(lambda: None, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


# ---- errors ----------------------------------------------------------------------------------


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
