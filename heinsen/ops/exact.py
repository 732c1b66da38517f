"""Exactness at every dynamic range: a fast form, the check of what it lost, and the exact form where it lost terms.

`run` takes three steps: the fast form, whose sums say whether underflow took terms from them; where it did, the exact
form from the start; and the same for the gradients. The exact form stands in a loop of no iterations where
nothing was lost: a branch of XLA's would hold the buffers of both its sides.

The exact forms take a chunk of tokens at a time, with states between them that are normalized, and so exact. A chunk is
tried by matmuls, relative to shifts of its own; one that loses terms even so is taken token by token. JAX
differentiates each chunk.

Axes: `*batch` any leading axes; T tokens; C tokens of a chunk; K key and V value features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import ShiftedLog, zero_grad_where_unread
from heinsen.ops import chunk
from heinsen.ops.chunk import ChunkShifts, Keys
from heinsen.ops.states import read_all
from heinsen.ops.values import N, Values

# Cotangents are divided by sums of at least values.SMALLEST_SUM = 1e-27, and some 1e4 quotients are added.
LARGE_COTANGENT = 1e6

X = TypeVar("X")


class Output(NamedTuple, Generic[N]):
    """y or log y, log Z if asked for, and the state after all tokens."""

    y: Array  # [*batch, T, V]
    log_z: ShiftedLog | None  # of arrays [*batch, T]
    state: N  # normalized


class Form(Protocol):
    """One way to compute a function of arrays fast, and one that is exact. Hashable: it is a constant when compiled."""

    def forward(self, *args: Any, save_residuals: bool) -> tuple[Any, Any, Array]:
        """(the output, what `backward` needs if it is saved, whether terms were lost: a scalar)."""

    def backward(self, *args: Any, residuals: Any, grads: Any, scale: Array) -> tuple[Any, ...]:
        """Gradients of the arguments, from those of the output, divided by `scale` meanwhile."""

    def exact(self, *args: Any, out: Any) -> Any:
        """The output; `out` are arrays of its shapes that may be overwritten."""

    def exact_backward(self, *args: Any, grads: Any, scale: Array, out: Any) -> tuple[Any, ...]:
        """Gradients of the arguments; `out` are arrays of their shapes that may be overwritten."""


@partial(jax.jit, static_argnums=0)
def run(form: Form, *args: Any) -> Any:
    """The output of a form, exact, with gradients. Jitted, so that a second call outside jit compiles nothing."""
    return _run(form, *vary_together(*args))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(form: Form, *args: Any) -> Any:
    out, _, lost = form.forward(*args, save_residuals=False)
    return _where_lost(lost, form.exact, args, out)


def _forward(form: Form, *args: Any) -> tuple[Any, Any]:
    out, residuals, lost = form.forward(*args, save_residuals=True)
    return _where_lost(lost, form.exact, args, out), (args, residuals, lost)


def _backward(form: Form, saved: Any, grads: Any) -> tuple[Any, ...]:
    args, residuals, lost = saved
    grads = lax.optimization_barrier(grads)  # XLA would fold the reduction of a constant at compile time, for seconds
    scale = cotangent_scale(grads)
    fast = form.backward(*args, residuals=residuals, grads=grads, scale=scale)
    exact = lambda *args, out: form.exact_backward(*args[:-2], grads=args[-2], scale=args[-1], out=out)
    return _where_lost(lost, exact, (*args, grads, scale), fast)


_run.defvjp(_forward, _backward)


def _where_lost(lost: Array, exact: Callable[..., X], args: Any, fast: X) -> X:
    """exact(*args, out=fast) if terms were lost, else `fast`."""

    def body(i: Array, out: X) -> X:
        # What depends on the iteration stays in the loop.
        return exact(*lax.optimization_barrier((args, i))[0], out=out)

    return lax.fori_loop(0, lost.astype(jnp.int32), body, fast)


def cotangent_scale(grads: Any) -> Array:
    """A divisor of the cotangents that keeps their quotients by sums in range: 1 unless some are very large."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    return jnp.where(jnp.isfinite(largest) & (largest > LARGE_COTANGENT), largest, 1.0)


# ---- trees of arrays ------------------------------------------------------------------------------


def multiply(arrays: X, factor: Array) -> X:
    """Every array times a factor."""
    return jax.tree.map(lambda x: x * factor, arrays)


def slice_tokens(arrays: X, i: Array, size: int, axis: int = -2) -> X:
    """The i-th `size` tokens of every array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, x.ndim + axis), arrays)


def write(arrays: X, parts: X, i: Array, axis: int = -2) -> X:
    """Arrays with their i-th part, of the parts' size, overwritten."""

    def write_one(x: Array, part: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], x.ndim + axis)

    return jax.tree.map(write_one, arrays, parts)


def vary_together(*trees: Any) -> Any:
    """The trees of arrays, each array varying over all mesh axes over which any of them does.

    Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop
    carries must vary over as many axes at its beginning as at its end, but an array made from a shape varies over none.
    """

    def axes_of(x: Array) -> frozenset[Any]:
        kind: Any = jax.typeof(x)
        return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # depends on JAX's version

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    axes = frozenset[Any]().union(*map(axes_of, jax.tree.leaves(trees)))
    return jax.tree.map(vary, trees) if axes else trees


# ---- the exact forms ------------------------------------------------------------------------------


def attend(kind: Values[N], chunk_size: int, q: Array, keys: Keys, state: N, out: Output[N]) -> Output[N]:
    """Causal attention of a whole number of chunks after a normalized state, written over `out`."""

    def step(i: Array, carry: tuple[N, Array, ShiftedLog | None]) -> Any:
        state, y, log_z = carry
        state, (chunk_y, chunk_log_z) = _attend_chunk(kind, *slice_tokens((q, keys), i, chunk_size), state)
        y = write(y, chunk_y, i)
        return state, y, None if log_z is None else write(log_z, chunk_log_z, i, axis=-1)

    end, y, log_z = lax.fori_loop(0, q.shape[-2] // chunk_size, step, (state, out.y, out.log_z))
    return Output(y, log_z, end)


def attend_backward(
    kind: Values[N],
    chunk_size: int,
    q: Array,
    keys: Keys,
    state: N,
    grads: Output[N],
    scale: Array,
    out: tuple[Array, Keys, N],
) -> tuple[Array, Keys, N]:
    """Gradients of `attend`, written over `out`; cotangents are divided by `scale` meanwhile."""
    n_chunks = q.shape[-2] // chunk_size
    tokens_of = lambda i: slice_tokens((q, keys), i, chunk_size)

    def next_state(state: N, i: Array) -> tuple[N, N]:
        return _attend_chunk(kind, *tokens_of(i), state)[0], state

    def step(carry: Any, xs: tuple[Array, N]) -> Any:
        (dstate, dq, dkeys), (i, before) = carry, xs
        chunk_q, chunk_keys = tokens_of(i)
        run = lambda q, k, values, log_decay, state: _attend_chunk(
            kind, q, Keys(k, values, chunk_keys.starts, log_decay), state
        )
        k, values, _, log_decay = chunk_keys
        (_, (_, log_z)), pull = jax.vjp(run, chunk_q, k, values, log_decay, before)
        dlog_z = jax.tree.map(jnp.zeros_like, log_z)
        if grads.log_z is not None:
            dlog_z = slice_tokens(grads.log_z, i, chunk_size, axis=-1)
        dy = slice_tokens(grads.y, i, chunk_size)
        *found, dstate = pull((dstate, multiply((dy, dlog_z), 1 / scale)))
        dq, dkeys = write((dq, dkeys), multiply((found[0], Keys(found[1], found[2], None, found[3])), scale), i)
        return (dstate, dq, dkeys), None

    befores = lax.scan(next_state, state, jnp.arange(n_chunks))[1]
    carry = multiply(grads.state, 1 / scale), *out[:2]
    (dstate, dq, dkeys), _ = lax.scan(step, carry, (jnp.arange(n_chunks), befores), reverse=True)
    return dq, dkeys, multiply(dstate, scale)


def summarize(kind: Values[N], chunk_size: int, keys: Keys, state: N) -> N:
    """Normalized state after any number of keys."""

    def step(state: N, keys: Keys) -> tuple[N, None]:
        decay = keys.decay()
        own = kind.state_of_tokens(keys.k, keys.values, None if decay is None else decay.log_until_end)
        return (state if decay is None else state.decay(decay.log_total)).merge(own), None

    padded = chunk.pad_keys(kind, keys, -keys.k.shape[-2] % chunk_size)
    in_chunks = jax.tree.map(partial(_chunks_first, size=chunk_size), padded)
    return lax.scan(jax.checkpoint(step), state, in_chunks)[0]


def read(chunk_size: int, q: Array, state: N) -> Array:
    """y or log y of any number of queries that read one normalized state."""
    n_tokens = q.shape[-2]
    padded = jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, -n_tokens % chunk_size), (0, 0)])
    y = lax.map(jax.checkpoint(lambda q: read_all(state, q)[0]), _chunks_first(padded, chunk_size))
    y = jnp.moveaxis(y, 0, -3)  # [*batch, n, C, V]
    return y.reshape(*y.shape[:-3], -1, y.shape[-1])[..., :n_tokens, :]


def _chunks_first(x: Array, size: int) -> Array:
    """[n, *batch, C, ...] of [*batch, T, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, 0)


def _attend_chunk(kind: Values[N], q: Array, keys: Keys, state: N) -> tuple[N, tuple[Array, ShiftedLog]]:
    """The state after a chunk, and (y, log Z): by matmuls if they lose nothing."""
    own = chunk.own_shifts(kind, lax.stop_gradient(keys))
    shifts = chunk.move_shifts_once(lax.stop_gradient(kind.state_shifts(state)), own)

    def sum_chunk(q: Array, keys: Keys, state: N, shifts: ChunkShifts) -> Any:
        queries, key_factors = chunk.query_factors(q, shifts), chunk.key_factors(kind, keys, shifts)
        m = kind.state_to_sums(state, shifts.reading)
        return queries, chunk.query_sums(queries, key_factors, m, shifts), chunk.next_sums(key_factors, m, shifts)

    # Not read where it is lost: its derivatives may be NaN there.
    queries, sums, end = zero_grad_where_unread(sum_chunk)(q, keys, state, shifts)
    lost = kind.has_lost_terms(chunk.fill_empty_features(kind, end, shifts.after)) | kind.spreads(end.s)
    lost |= kind.has_lost_terms(chunk.fill_empty_queries(kind, queries, sums, shifts)) | kind.spreads(sums.s)

    def by_matmuls() -> Any:  # logarithms and quotients only here: of lost sums their gradients could be NaN
        y, log_z = kind.mean(sums, shifts.reading.b), chunk.log_z(queries, sums)
        return kind.sums_to_state(end, shifts.after), (y, log_z)

    return lax.cond(lost, lambda: _token_by_token(kind, q, keys, state), by_matmuls)


def _token_by_token(kind: Values[N], q: Array, keys: Keys, state: N) -> tuple[N, tuple[Array, ShiftedLog]]:
    """As `_attend_chunk`."""

    def take(state: N, token: tuple[Array, Keys]) -> tuple[N, tuple[Array, ShiftedLog]]:
        q, (k, values, starts, log_decay) = token
        if log_decay is not None:
            state = state.decay(log_decay[..., 0])
        if starts is not None:
            state = jax.tree.map(lambda old, new: jnp.where(starts[..., 0], new, old), state, state.empty())
        state = state.merge(kind.normalized_token(k, values))
        return state, state.read(q)

    # Checkpointed: else the gradient has room for all tokens' states, and compilers reserve it whether it runs or not.
    step = jax.checkpoint(zero_grad_where_unread(take))
    for _ in range(state.h_z.shift.ndim - 1):  # every sequence by itself: others may be read here
        step = jax.vmap(step)
    state, (y, log_z) = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), (q, keys)))
    return state, (jnp.moveaxis(y, 0, -2), jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), log_z))
