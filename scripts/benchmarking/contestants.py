"""The contestants of the attention benchmark: heinsen's implementations, and those of JAX, PyTorch and fla."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import heinsen
from heinsen.errors import InputError
from heinsen.ops import chunked
from heinsen.ops.api import IMPLEMENTATIONS
from scripts.benchmarking.measure import free_memory

DIRECTIONS = FORWARD, BACKWARD = "forward", "forward+backward"
CHUNKED = "heinsen chunked"
CUDNN = "softmax (cuDNN)"
PLAIN = ("scan", "reference")  # implementations that are timed as yardsticks only, for log values without a gate


@dataclass(frozen=True)
class Shape:
    """The shape [batch, heads, n_tokens, features] of queries, keys and values, and their dtype."""

    batch: int
    heads: int
    n_tokens: int
    features: int
    dtype: str

    @property
    def axes(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.n_tokens, self.features


@dataclass(frozen=True)
class Prepared:
    """One contestant at one shape: a call that waits for its result, and its peak memory beyond the inputs."""

    call: Callable[[], Any]
    peak_bytes: int | None


class SkipError(Exception):
    """The reason why a contestant cannot run at a shape."""


Prepare = Callable[[Shape, str], Prepared]  # (shape, direction); raises SkipError


def contestants() -> dict[str, Prepare]:
    """Return {name: how to prepare it} of the contestants that can run on this machine."""
    found: dict[str, Prepare] = {}
    for name in ("chunked", *(name for name in IMPLEMENTATIONS if name != "chunked")):
        log_attention = functools.partial(heinsen.log_attention, implementation=name)
        attention = functools.partial(heinsen.attention, implementation=name)
        found[f"heinsen {name}"] = functools.partial(_prepare_jax, log_attention)
        if name not in PLAIN:
            found[f"heinsen {name} (real values)"] = functools.partial(_prepare_jax, attention)
            gated = lambda q, k, v, g, attend=log_attention: attend(q, k, v, log_decay=g)
            found[f"heinsen {name} (forget gate)"] = functools.partial(_prepare_jax, gated, gated=True)
    found[f"{CHUNKED} (unchecked)"] = functools.partial(_prepare_jax, unchecked_attention)
    found["softmax (jax)"] = functools.partial(_prepare_jax_softmax, "xla")
    if jax.default_backend() == "gpu":
        found[CUDNN] = functools.partial(_prepare_jax_softmax, "cudnn")
    return found | _torch_contestants()


def unchecked_attention(q: jax.Array, k: jax.Array, log_v: jax.Array) -> jax.Array:
    """Return the chunked form without detection and repair of lost terms: the difference is the cost of exactness."""
    q, k, log_v = (x.astype(jnp.float32) for x in (q, k, log_v))
    log_y, _ = chunked.log_attention(q, k, log_v, causal=True, state=None, starts=None, exact=False)
    return log_y


# ---- JAX -----------------------------------------------------------------------------------------


def _prepare_jax(function: Callable[..., jax.Array], shape: Shape, direction: str, gated: bool = False) -> Prepared:
    """Compile the function, and its gradient for BACKWARD; `gated`: of log decays, too."""
    grad, *inputs = (jax.random.normal(key, shape.axes, shape.dtype) for key in jax.random.split(jax.random.key(0), 4))
    if gated:  # time constants from 1 to 1000 tokens
        exponents = jax.random.uniform(jax.random.key(1), shape.axes[:-1])
        inputs.append(-(1e-3**exponents))

    def with_gradient(grad, *inputs):
        y, pull = jax.vjp(function, *inputs)
        return y, pull(grad.astype(y.dtype))  # y too, as in training, where the layers above need it

    run, arguments = (function, inputs) if direction == FORWARD else (with_gradient, [grad, *inputs])
    try:
        compiled = jax.jit(run).lower(*arguments).compile()
    except InputError as error:  # a kernel that is not for this device
        raise SkipError(str(error)) from None
    memory = compiled.memory_analysis()
    peak = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
    free = free_memory()
    if peak is not None and free is not None and peak > 0.9 * free:
        raise SkipError(f"needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), peak)


def _prepare_jax_softmax(implementation: Literal["xla", "cudnn"], shape: Shape, direction: str) -> Prepared:
    if implementation == "cudnn" and shape.dtype != "bfloat16":
        raise SkipError("it takes 16-bit numbers only")
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    tokens_first = lambda x: x.swapaxes(1, 2)
    return _prepare_jax(lambda q, k, v: tokens_first(attend(*map(tokens_first, (q, k, v)))), shape, direction)


# ---- PyTorch -------------------------------------------------------------------------------------


def _torch_contestants() -> dict[str, Prepare]:
    try:
        import torch
    except ImportError:
        return {}
    on_gpu = torch.cuda.is_available()
    if on_gpu != (jax.default_backend() == "gpu"):  # they would run on different devices
        return {}
    found: dict[str, Prepare] = {"softmax (torch)": functools.partial(_prepare_torch, _torch_softmax)}
    if on_gpu and importlib.util.find_spec("fla") is not None:
        found["linear (flash-linear-attention)"] = functools.partial(_prepare_torch, _torch_linear)
    return found


def _torch_softmax(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _torch_linear(q: Any, k: Any, v: Any) -> Any:
    from fla.ops.linear_attn import chunk_linear_attn

    y = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)
    return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)


def _prepare_torch(function: Callable[..., Any], shape: Shape, direction: str) -> Prepared:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, dtype = torch.Generator(device).manual_seed(0), getattr(torch, shape.dtype)
    options = dict(generator=generator, device=device, dtype=dtype)
    *inputs, grad = [torch.randn(shape.axes, requires_grad=i < 3, **options) for i in range(4)]

    def forward():
        with torch.no_grad():
            function(*inputs)

    def backward():
        torch.autograd.grad(function(*inputs), inputs, grad)

    run = forward if direction == FORWARD else backward
    if device == "cpu":
        return Prepared(run, _growth_of_resident_memory(run))

    def call():
        run()
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return Prepared(call, torch.cuda.max_memory_allocated() - before)


def _growth_of_resident_memory(call: Callable[[], Any]) -> int | None:
    """Return how much a call raises the process's peak of resident memory, or None if the system does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _read_status("VmRSS")
        call()
        return max(0, _read_status("VmHWM") - before)
    except OSError:
        return None


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
