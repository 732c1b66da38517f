"""The contestants of the attention benchmark: heinsen's implementations, and those of JAX and PyTorch."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

import heinsen
from heinsen.errors import InputError
from scripts.benchmarking.measure import IMPLEMENTATIONS, free_memory

DIRECTIONS = FORWARD, BACKWARD = "forward", "forward+backward"
CHUNKED, SOFTMAX = "heinsen chunked", "softmax (jax)"
INPUTS = ("normal", "offsets", "spikes", "tails", "values")


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


def contestants() -> "dict[str, JaxContestant | TorchContestant]":
    """Return the contestants that can run on this machine, by name."""
    found: dict[str, JaxContestant | TorchContestant] = dict(jax_contestants())
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available() == (jax.default_backend() == "gpu"):  # else they would run on different devices
            found["softmax (torch)"] = TorchContestant()
    return found


def jax_contestants() -> "dict[str, JaxContestant]":
    found = {}
    for name in IMPLEMENTATIONS:
        log_attention = functools.partial(heinsen.log_attention, implementation=name)
        found[f"heinsen {name}"] = JaxContestant(log_attention)
        if name in ("chunked", "pallas"):
            attention = functools.partial(heinsen.attention, implementation=name)
            gated = lambda q, k, v, g, attend=log_attention: attend(q, k, v, log_decay=g)
            found[f"heinsen {name} (real values)"] = JaxContestant(attention)
            found[f"heinsen {name} (forget gate)"] = JaxContestant(gated, gated=True)
    found[SOFTMAX] = JaxContestant(functools.partial(_jax_softmax, "xla"))
    if jax.default_backend() == "gpu":
        found["softmax (cuDNN)"] = JaxContestant(functools.partial(_jax_softmax, "cudnn"))
    return found


# ---- JAX -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JaxContestant:
    """A causal attention y = function(q, k, v) of arrays [B, H, T, K]; gated: of log decays [B, H, T], too."""

    function: Callable[..., jax.Array]
    gated: bool = False

    def pass_for(self, direction: str) -> Callable[..., Any]:
        """Return the function that is compiled, of (the gradient by y, q, k, v), for BACKWARD with all gradients."""

        def forward(_, *inputs):
            return self.function(*inputs)

        def backward(grad, *inputs):
            y, pull = jax.vjp(self.function, *inputs)
            return y, pull(grad.astype(y.dtype))  # y too, as in training, where the layers above need it

        return forward if direction == FORWARD else backward

    def draw(self, shape: Shape, inputs: str = "normal") -> list[jax.Array]:
        """Return arguments: the gradient, q, k, v and log decays, for time constants from 1 to 1000 tokens.

        inputs: "normal" numbers; "offsets": all features of a key plus a number of deviation 20; "spikes": 1% of the
        entries of q and k are 100; "tails": q and k are 3 n exp(n') of normal n and n'; "values": v has deviation 30.
        """
        normal = lambda seed, axes=shape.axes: jax.random.normal(jax.random.key(seed), axes, shape.dtype)
        grad, q, k, v = map(normal, range(4))
        if inputs == "offsets":
            k = k + 20 * normal(4, (*shape.axes[:-1], 1))
        elif inputs == "spikes":
            is_spike = lambda seed: jax.random.uniform(jax.random.key(seed), shape.axes) < 0.01
            q, k = jnp.where(is_spike(4), 100, q), jnp.where(is_spike(5), 100, k)
        elif inputs == "tails":
            q, k = 3 * q * jnp.exp(normal(4)), 3 * k * jnp.exp(normal(5))
        elif inputs == "values":
            v = 30 * v
        decays = [-(1e-3 ** jax.random.uniform(jax.random.key(6), shape.axes[:-1]))] if self.gated else []
        return [grad, q, k, v, *decays]

    def compile(self, direction: str, arguments: list[jax.Array]) -> jax.stages.Compiled:
        """Compile one pass. Raises SkipError."""
        try:
            return jax.jit(self.pass_for(direction)).lower(*arguments).compile()
        except InputError as error:  # a kernel that is not for this device
            raise SkipError(str(error)) from None

    def prepare(self, shape: Shape, direction: str, inputs: str = "normal") -> Prepared:
        """Return a call of one pass. Raises SkipError."""
        arguments = self.draw(shape, inputs)
        compiled = self.compile(direction, arguments)
        memory = compiled.memory_analysis()
        peak = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
        free = free_memory()
        if peak is not None and free is not None and peak > 0.9 * free:
            raise SkipError(f"needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), peak)


def _jax_softmax(implementation: Literal["xla", "cudnn"], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if implementation == "cudnn" and q.dtype != jnp.bfloat16:
        raise SkipError("it takes 16-bit numbers only")
    tokens_first = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(*tokens_first, is_causal=True, implementation=implementation).swapaxes(1, 2)


# ---- PyTorch -------------------------------------------------------------------------------------


class TorchContestant:
    """PyTorch's causal softmax attention."""

    def prepare(self, shape: Shape, direction: str) -> Prepared:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator, dtype = torch.Generator(device).manual_seed(0), getattr(torch, shape.dtype)
        options = dict(generator=generator, device=device, dtype=dtype)
        *inputs, grad = [torch.randn(shape.axes, requires_grad=i < 3, **options) for i in range(4)]
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, *inputs, is_causal=True)

        def call():
            if direction == BACKWARD:
                torch.autograd.grad(attend(), inputs, grad)
            else:
                with torch.no_grad():
                    attend()
            if device == "cuda":
                torch.cuda.synchronize()

        if device == "cpu":  # it does not say what a call takes
            return Prepared(call, None)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return Prepared(call, torch.cuda.max_memory_allocated() - before)
