"""FLOPs, peak rates and memory of a training step, and the rates that a run measures."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from heinsen.chips import chip_of


def train_flops_per_token(n_params: int) -> float:
    """Return 6 N: two FLOPs per parameter forward, four backward. N counts the tied embedding once (as the head)."""
    return 6.0 * n_params


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


def format_bytes(n: int) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


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


class ThroughputMeter:
    """Measures tokens/s, model-FLOPs utilization and the share of time spent waiting for data.

    Args:
      step: the last step that is done.
      tokens_per_step: of all processes.
      flops_per_token: of the model (`train_flops_per_token`).
      peak_flops: of all devices, in FLOP/s.
    """

    def __init__(self, step: int, tokens_per_step: int, flops_per_token: float, peak_flops: float) -> None:
        self._tokens_per_step, self._flops_per_token, self._peak_flops = tokens_per_step, flops_per_token, peak_flops
        self._step, self._start, self._data_seconds = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block's time out of all rates."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    def measure(self, step: int) -> dict[str, float]:
        """Return the rates since the last call, up to the end of `step`."""
        now = time.perf_counter()
        seconds = now - self._start
        rate = (step - self._step) * self._tokens_per_step / seconds
        rates = {
            "tokens_per_second": rate,
            "mfu": rate * self._flops_per_token / self._peak_flops,
            "data_wait": self._data_seconds / seconds,
        }
        self._step, self._start, self._data_seconds = step, now, 0.0
        return rates
