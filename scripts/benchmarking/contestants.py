"""The contestants of the attention benchmark: heinsen's implementations, and those of JAX and other packages."""

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp

import heinsen
from heinsen import backend
from heinsen.errors import InputError
from heinsen.ops.softmax import softmax_attention
from scripts.benchmarking import measure

DIRECTIONS = FORWARD, BACKWARD = "forward", "forward+backward"
CHUNKED = "heinsen chunked"
INPUTS = ("normal", "offsets", "spikes", "tails", "values")
GATE, DOCUMENTS = ("log_decay",), ("segment_ids",)  # names of further arrays

# Cases of heinsen's attention: a function, the further arrays that it is given, other arguments.
_MAIN_CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "": ("log_attention", (), {}),
    " (real values)": ("attention", (), {}),
    " (forget gate)": ("log_attention", GATE, {}),
}
_CASES = _MAIN_CASES | {
    " (documents)": ("log_attention", DOCUMENTS, {}),
    " (forget gate, documents)": ("log_attention", GATE + DOCUMENTS, {}),
    " (all keys)": ("log_attention", (), {"causal": False}),
    " (all keys, real values)": ("attention", (), {"causal": False}),
    " (all keys of documents)": ("log_attention", DOCUMENTS, {"causal": False}),
}


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
    """One contestant at one shape: a call that waits for its result. peak_bytes: beyond the inputs."""

    call: Callable[[], Any]
    peak_bytes: int | None
    seconds_compiling: float | None = None


class SkipError(Exception):
    """The reason why a contestant cannot run at a shape."""


def contestants(
    inputs: Sequence[str] = INPUTS[:1], old: ModuleType | None = None
) -> "dict[str, JaxContestant | TorchContestant]":
    """Return the contestants on this machine, by name: those of JAX with each kind of inputs.

    old: another version of heinsen; then both versions' chunked forms alone, in all cases.
    """
    if old is not None:
        versions = ("heinsen", heinsen), ("old", old)
        return {f"{name} chunked{case}": _heinsen("chunked", case, x) for case in _CASES for name, x in versions}
    found: dict[str, JaxContestant | TorchContestant] = dict(jax_contestants(inputs))
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available() == (jax.default_backend() == "gpu"):  # else they would run on different devices
            found["softmax (torch)"] = TorchContestant()
    return found


def jax_contestants(inputs: Sequence[str] = INPUTS[:1]) -> "dict[str, JaxContestant]":
    """Return JAX's contestants on the backend that is compiled for, by name, with each kind of inputs."""
    found = {}
    for name in measure.IMPLEMENTATIONS:
        cases = _MAIN_CASES if name in ("chunked", "pallas") else [""]
        found |= {f"heinsen {name}{case}": _heinsen(name, case) for case in cases}
    found["softmax (jax)"] = JaxContestant(functools.partial(_jax_softmax, "xla"))
    found["softmax (forget gate)"] = JaxContestant(softmax_attention, GATE)
    if backend.current() == "gpu":
        found["softmax (cuDNN)"] = JaxContestant(functools.partial(_jax_softmax, "cudnn"))
        found["linear attention (jla)"] = JaxContestant(_jla, GATE)
    rename = lambda name, kind: name if kind == INPUTS[0] else f"{name}: {kind}"
    return {rename(name, kind): replace(x, inputs=kind) for name, x in found.items() for kind in inputs}


def with_normal_inputs(name: str) -> str:
    """Return the name of a contestant with normal inputs."""
    return name.partition(":")[0]


def _with_gate(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda q, k, v, log_decay: function(q, k, v, log_decay=log_decay)


# ---- JAX -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JaxContestant:
    """A causal attention y = function(q, k, v, **further arrays) of arrays [B, H, T, K].

    further: the names of GATE and DOCUMENTS that it is given. inputs: what all are (`draw`).
    """

    function: Callable[..., jax.Array]
    further: tuple[str, ...] = ()
    inputs: str = INPUTS[0]

    def pass_for(self, direction: str) -> Callable[[dict[str, jax.Array]], Any]:
        """Return the function of the arrays that is compiled, for BACKWARD with all gradients."""

        def attend(floats: dict[str, jax.Array], **documents: jax.Array) -> jax.Array:
            further = {name: x for name, x in floats.items() if name in GATE}
            return self.function(floats["q"], floats["k"], floats["v"], **further, **documents)

        def run(arrays: dict[str, jax.Array]) -> Any:
            documents = {name: x for name, x in arrays.items() if name in DOCUMENTS}
            floats = {name: x for name, x in arrays.items() if name not in ("grad", *DOCUMENTS)}
            if direction == FORWARD:
                return attend(floats, **documents)
            y, pull = jax.vjp(functools.partial(attend, **documents), floats)
            return y, pull(arrays["grad"].astype(y.dtype))[0]  # y too, as in training, where the layers above need it

        return run

    def draw(self, shape: Shape) -> dict[str, jax.Array]:
        """Return the arrays by name, with the gradient by y. Log decays have time constants from 1 to 1000 tokens.

        inputs are "normal" numbers; "offsets": all features of a key plus a number of deviation 20; "spikes": 1% of the
        entries of q and k are 100; "tails": q and k are 3 n exp(n') of normal n and n'; "values": v has deviation 30.
        """
        normal = lambda seed, axes=shape.axes: jax.random.normal(jax.random.key(seed), axes, shape.dtype)
        grad, q, k, v = map(normal, range(4))
        if self.inputs == "offsets":
            k = k + 20 * normal(4, (*shape.axes[:-1], 1))
        elif self.inputs == "spikes":
            is_spike = lambda seed: jax.random.uniform(jax.random.key(seed), shape.axes) < 0.01
            q, k = jnp.where(is_spike(4), 100, q), jnp.where(is_spike(5), 100, k)
        elif self.inputs == "tails":
            q, k = 3 * q * jnp.exp(normal(4)), 3 * k * jnp.exp(normal(5))
        elif self.inputs == "values":
            v = 30 * v
        decays = -(1e-3 ** jax.random.uniform(jax.random.key(6), shape.axes[:-1]))
        documents = jnp.sort(jax.random.randint(jax.random.key(7), (shape.batch, 1, shape.n_tokens), 0, 5))
        further = {"log_decay": decays, "segment_ids": documents}
        return dict(grad=grad, q=q, k=k, v=v) | {name: further[name] for name in self.further}

    def prepare(self, shape: Shape, direction: str) -> Prepared:
        """Return a call of one pass. Raises SkipError."""
        arrays, start = self.draw(shape), time.perf_counter()
        try:
            compiled = jax.jit(self.pass_for(direction)).lower(arrays).compile()
        except InputError as error:  # a kernel that is not for this device
            raise SkipError(str(error)) from None
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        peak = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
        free = measure.free_memory()
        if peak is not None and free is not None and peak > 0.9 * free:
            raise SkipError(f"needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        return Prepared(lambda: jax.block_until_ready(compiled(arrays)), peak, seconds)


def _heinsen(implementation: str, case: str, package: ModuleType = heinsen) -> JaxContestant:
    name, further, options = _CASES[case]
    return JaxContestant(functools.partial(getattr(package, name), implementation=implementation, **options), further)


def _jax_softmax(implementation: Literal["xla", "cudnn"], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if implementation == "cudnn" and q.dtype != jnp.bfloat16:
        raise SkipError("it takes 16-bit numbers only")
    tokens_first = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(*tokens_first, is_causal=True, implementation=implementation).swapaxes(1, 2)


def _jla(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> jax.Array:
    """Linear attention with a forget gate, by the kernels for Hopper GPUs of jax-linear-attention."""
    if importlib.util.find_spec("jla") is None:
        raise SkipError("not installed: pip install jax-linear-attention, for Python 3.12 and jax 0.11.2")
    from jla import ops

    q, k, v, log_decay = (x.swapaxes(1, 2) for x in (q, k, v, log_decay))
    y, _ = ops.linear_attention("simple_gla", q, k, v, g=log_decay, impl="mosaic_gpu")
    return y.swapaxes(1, 2)


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
