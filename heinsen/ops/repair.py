"""The exact path of the chunked form: every chunk again, from an exact state, token by token where it must be.

It runs where the fast pass has lost terms to underflow, as loops whose number of iterations is 0 everywhere else: no
branch of XLA's, whose two sides would both hold buffers. States between chunks are normalized, and so exact at every
dynamic range. A chunk is first tried by matmuls, relative to shifts of its own; a chunk that loses terms even so is
taken token by token. JAX differentiates each chunk.

Axes: `*batch` any leading axes; T tokens; C tokens of a chunk; K key and V value features.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import ShiftedLog, zero_grad_where_unread
from heinsen.ops import chunk
from heinsen.ops.chunk import ChunkShifts, Keys, Tokens
from heinsen.ops.schedule import (
    Call,
    Output,
    multiply,
    pick_chunk,
    slice_last,
    slice_tokens,
    token_axis,
    write,
    write_chunk,
)
from heinsen.ops.values import N, Values


def forward(call: Call, tokens: Tokens, state: N, lost: Array, out: Output[N]) -> Output[N]:
    """The output of the fast pass or, if it lost terms, the exact one."""

    def step(i: Array, carry: Any) -> Any:
        state, y, log_z = carry
        (y_chunk, log_z_chunk), state = exact_chunk(call.kind, slice_tokens(tokens, i, call.split.chunk_size), state)
        y = y if y is None else write(y, y_chunk, i)
        log_z = log_z if log_z is None else write(log_z, log_z_chunk, i, axis=-1)
        return state, y, log_z

    end, y, log_z = lax.fori_loop(0, _n_repaired(call, lost), step, (state, out.y, out.log_z))
    return Output(y, log_z, _choose(lost, end, out.state))


def backward(
    call: Call,
    tokens: Tokens,
    state: N,
    before: N,
    lost: Array,
    grads: Output[N],
    scale: Array,
    fast: tuple[Tokens, N],
) -> tuple[Tokens, N]:
    """Gradients of the fast pass or, if terms were lost, exact ones, of cotangents divided by `scale` meanwhile.

    `before` are arrays to overwrite, for the states before each chunk, [n_groups, *batch, N, ...] (`schedule.Split`).
    """
    kind, split = call.kind, call.split
    n_chunks, n_repaired = split.n_groups * split.n_chunks, _n_repaired(call, lost)
    axis = state.h_z.shift.ndim - 1

    def save_state(i: Array, carry: Any) -> Any:
        state, before = carry
        before = write_chunk(before, state, i, split, axis)
        keys = slice_tokens(tokens.keys, i, split.chunk_size)
        return exact_chunk(kind, Tokens(None, keys), state)[1], before

    if tokens.keys is None:
        before = jax.tree.map(lambda x, part: jnp.broadcast_to(jnp.expand_dims(part, axis), x.shape), before, state)
    else:
        before = lax.fori_loop(0, n_repaired, save_state, (state, before))[1]

    def step(j: Array, carry: Any) -> Any:
        dstate, dtokens = carry
        i = n_chunks - 1 - j
        dchunk, dstate = _chunk_grads(call, tokens, pick_chunk(before, i, split, axis), i, grads, scale, dstate)
        return dstate, write(dtokens, multiply(dchunk, scale), i)

    dtokens, dstate_fast = fast
    dend = multiply(grads.state, 1 / scale)
    dstate, dtokens = lax.fori_loop(0, n_repaired, step, (dend, dtokens))
    return dtokens, _choose(lost, multiply(dstate, scale), dstate_fast)


def _chunk_grads(
    call: Call, tokens: Tokens, before: Any, i: Array, grads: Output[Any], scale: Array, dafter: Any
) -> tuple[Tokens, Any]:
    """Gradients of chunk i and the normalized state before it, from those of the output and the state after it."""
    size = call.split.chunk_size
    q, keys = slice_tokens(tokens, i, size)

    def run(q: Array | None, keys: Keys | None, state: Any) -> Any:
        keys = None if keys is None else keys._replace(starts=starts)
        return exact_chunk(call.kind, Tokens(q, keys), state)

    starts = None if keys is None else keys.starts
    ((_, log_z), _), vjp = jax.vjp(run, q, None if keys is None else keys._replace(starts=None), before)
    dlog_z = jax.tree.map(jnp.zeros_like, log_z)
    if grads.log_z is not None:
        dlog_z = jax.tree.map(lambda x: slice_last(x, i, size), grads.log_z)
    dout = multiply((slice_tokens(grads.y, i, size), dlog_z), 1 / scale)
    dq, dkeys, dbefore = vjp((dout, dafter))
    return Tokens(dq, dkeys), dbefore


def exact_chunk(kind: Values[Any], tokens: Tokens, state: Any) -> tuple[tuple[Array | None, ShiftedLog | None], Any]:
    """((y, log Z), the state after) of a chunk and the normalized state before it, by matmuls if they lose nothing."""
    shifts = ChunkShifts(lax.stop_gradient(kind.state_shifts(state)))
    if tokens.keys is not None:
        own, axis = chunk.own_shifts(kind, lax.stop_gradient(tokens.keys)), shifts.reading.c.ndim - 1
        in_turn = jax.tree.map(lambda x: jnp.expand_dims(x, axis), own)
        shifts = jax.tree.map(lambda x: jnp.squeeze(x, axis), chunk.move_shifts(shifts.reading, in_turn, axis))

    def sum_chunk(tokens: Tokens, state: Any) -> Any:
        f = chunk.compute_factors(kind, tokens, shifts)
        m = kind.state_to_sums(state, shifts.reading)
        sums = None if f.queries is None else chunk.query_sums(f.queries, f.keys, m, shifts)
        return f.queries, sums, chunk.next_sums(f.keys, m, shifts)

    # Not read where it is lost: its derivatives may be NaN there.
    queries, sums, end = zero_grad_where_unread(sum_chunk)(tokens, state)
    lost = kind.has_lost_terms(chunk.fill_empty_features(kind, end, shifts.after)) | kind.spreads(end.s)
    if queries is not None:
        lost |= kind.has_lost_terms(chunk.fill_empty_queries(kind, queries, sums, shifts)) | kind.spreads(sums.s)

    def by_matmuls() -> Any:  # logarithms and quotients only here: of lost sums their gradients could be NaN
        out: tuple[Array | None, ShiftedLog | None] = None, None
        if queries is not None:
            out = kind.mean(sums, shifts.reading.b), chunk.query_log_z(queries, sums)
        return out, state if tokens.keys is None else kind.sums_to_state(end, shifts.after)

    return lax.cond(lost, lambda: _token_by_token(kind, tokens, state), by_matmuls)


def _token_by_token(kind: Values[Any], tokens: Tokens, state: Any) -> Any:
    """((y, log Z), the state after) in normalized form."""

    def take(state: Any, token: Tokens) -> Any:
        if token.keys is not None:
            k, values, starts, log_decay = token.keys
            if log_decay is not None:
                state = state.decay(log_decay[..., 0])
            if starts is not None:
                state = jax.tree.map(lambda old, new: jnp.where(starts, new, old), state, state.empty())
            state = state.merge(kind.normalized_token(k, values))
        return state, None if token.q is None else state.read(token.q)

    # Checkpointed: else the gradient has room for all tokens' states, and compilers reserve it whether it runs or not.
    step = jax.checkpoint(zero_grad_where_unread(take))
    for _ in range(state.h_z.shift.ndim - 1):  # every sequence by itself: others may be read here
        step = jax.vmap(step)

    state, out = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, token_axis(x), 0), tokens))
    if out is None:
        return (None, None), state
    return (jnp.moveaxis(out[0], 0, -2), jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), out[1])), state


def _n_repaired(call: Call, lost: Array) -> Array:
    """Chunks to repair: all or none."""
    return jnp.where(lost, call.split.n_groups * call.split.n_chunks, 0)


def _choose(lost: Array, exact: Any, fast: Any) -> Any:
    return jax.tree.map(lambda exact, fast: jnp.where(lost, exact, fast), exact, fast)
