"""The attention at matmul speed, exact at every dynamic range, in memory linear in T: the default form.

A call takes three steps: the fast pass (`schedule`, the mathematics of `chunk`), one check of all sums for terms lost
to underflow, and the repair (`repair`), which costs nothing where nothing was lost. The backward pass takes the same
steps, from the inputs, the queries' sums and the sums between chunks.

Arguments are those of `heinsen.log_attention` and `heinsen.attention`, validated there; `starts` [*batch, T] is true
where a packed document starts (`documents.document_starts`). Axes as in `chunk`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from heinsen import platform
from heinsen.logspace import NEG_INF, log_shares
from heinsen.ops import repair, schedule
from heinsen.ops.chunk import Keys, Tokens, following
from heinsen.ops.decay import take_resets
from heinsen.ops.documents import document_ends
from heinsen.ops.schedule import Call, Output, pad_tokens, token_axis
from heinsen.ops.states import LogState, MeanState, S
from heinsen.ops.values import LOG_VALUES, REAL_VALUES, N, Values


def log_attention(
    q: Array,
    k: Array,
    log_v: Array,
    causal: bool,
    state: LogState | None,
    starts: Array | None,
    log_decay: Array | None = None,
    *,
    exact: bool = True,
    fused: bool = False,
) -> tuple[Array, LogState]:
    """(log y [*batch, T, V], the `LogState` after all tokens). Unless `exact`, lost terms stay lost.

    `fused`: by one kernel for each pass, for TPUs and GPUs.
    """
    first = None if state is None else _cast(state, k.dtype).normalize()
    log_y, end = _attend(LOG_VALUES, q, _keys(k, log_v, starts, log_decay), causal, first, exact, fused)
    return log_y, end.denormalize()


def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    state: MeanState | None,
    starts: Array | None,
    log_decay: Array | None = None,
    *,
    exact: bool = True,
    fused: bool = False,
) -> tuple[Array, MeanState]:
    """(y [*batch, T, V], the `MeanState` after all tokens). Unless `exact`, lost terms stay lost.

    `fused`: by one kernel for each pass, for TPUs and GPUs.
    """
    first = None if state is None else _cast(state, k.dtype).normalize()
    y, end = _attend(REAL_VALUES, q, _keys(k, v, starts, log_decay), causal, first, exact, fused)
    return y, end.denormalize()


def state_after(
    k: Array, log_v: Array, state: LogState, starts: Array | None, log_decay: Array | None = None
) -> LogState:
    """The `LogState` after all tokens, without outputs."""
    tokens = Tokens(None, _keys(k, log_v, starts, log_decay))
    return _run_padded(LOG_VALUES, tokens, state.normalize()).state.denormalize()


def attend_both_ways(
    kind: Values[Any], q: Array, k: Array, values: Array, starts: Array | None, log_decay: Array, log_decay_after: Array
) -> Array:
    """y or log y [*batch, T, V] of all tokens of a query's document.

    The weights of earlier tokens decay by log_decay, those of later tokens by log_decay_after, each [*batch, T].
    """
    starts = jnp.zeros(k.shape[:-1], bool) if starts is None else starts
    log_decay, resets = take_resets(log_decay, starts)
    run = partial(_run_padded, kind, return_log_z=True)
    keys = _keys(k, values, resets, log_decay)
    return _attend_both_ways(kind, q, keys, starts, _empty_state(kind, keys), run, log_decay_after)[0]


def _keys(k: Array, values: Array, starts: Array | None, log_decay: Array | None) -> Keys:
    return Keys(k, values, starts, None if log_decay is None else log_decay[..., None])


def _empty_state(kind: Values[N], keys: Keys) -> N:
    # XLA would spend seconds folding what follows from so large a constant.
    return lax.optimization_barrier(kind.empty_state(keys.k, keys.values))


def _attend(
    kind: Values[N], q: Array, keys: Keys, causal: bool, state: N | None, exact: bool, fused: bool
) -> tuple[Array, N]:
    run = partial(_run_padded, kind, exact=exact, fused=fused)
    state = _empty_state(kind, keys) if state is None else state
    if causal:
        y, _, end = run(Tokens(q, keys), state)
    elif keys.starts is None:
        end = run(Tokens(None, keys), state).state
        y = run(Tokens(q, None), end).y
    else:
        y, end = _attend_both_ways(kind, q, keys, keys.starts, state, partial(run, return_log_z=True))
    assert y is not None
    return y, end


def _attend_both_ways(
    kind: Values[N],
    q: Array,
    keys: Keys,
    document_starts: Array,
    state: N,
    run: Callable[[Tokens, N], Output[N]],
    log_decay_after: Array | None = None,
) -> tuple[Array, N]:
    """Every query sees its whole document: the keys up to its own and, in a run from the end, the later ones."""
    past = run(Tokens(q, keys), state)
    # From the end, each token takes the key of the token after it, unless that starts another document.
    ends = document_ends(document_starts)
    later_k = jnp.where(ends[..., None], NEG_INF, _shift_earlier(keys.k, NEG_INF))
    later_values = jnp.where(ends[..., None], kind.zero, _shift_earlier(keys.values, kind.zero))
    later = Keys(later_k, later_values, ends)
    if log_decay_after is not None:
        later_decay, resets = take_resets(_shift_earlier(log_decay_after, 0.0, axis=-1), ends)
        later = later._replace(starts=resets, log_decay=later_decay[..., None])

    future = run(jax.tree.map(lambda x: jnp.flip(x, token_axis(x)), Tokens(q, later)), state.empty())
    assert past.y is not None and past.log_z is not None and future.y is not None and future.log_z is not None
    future_y, future_log_z = jnp.flip(future.y, axis=-2), jax.tree.map(lambda x: jnp.flip(x, axis=-1), future.log_z)
    past_share, future_share = (share[..., None] for share in log_shares(past.log_z, future_log_z))
    return kind.combine(past.y, past_share, future_y, future_share), past.state


def _cast(state: S, dtype: DTypeLike) -> S:
    return jax.tree.map(lambda part: part.astype(dtype), state)


def _shift_earlier(x: Array, fill: float, axis: int = -2) -> Array:
    """Each token's successor in its place, and `fill` in the last one's."""
    axis += x.ndim
    return following(x, jnp.full_like(lax.index_in_dim(x, -1, axis, keepdims=False), fill), axis)


def _run_padded(
    kind: Values[N], tokens: Tokens, state: N, *, return_log_z: bool = False, exact: bool = True, fused: bool = False
) -> Output[N]:
    """`_run` for any number of tokens."""
    x = tokens.q if tokens.keys is None else tokens.keys.k
    assert x is not None
    fused = fused and tokens.q is not None and tokens.keys is not None
    if fused:
        _passes(fused).check(tokens)
    n_tokens, split = x.shape[-2], _passes(fused).split_tokens(x.shape)
    padded = pad_tokens(kind, tokens, split.n_tokens - n_tokens)
    y, log_z, state = _run(Call(kind, split, return_log_z, exact, fused), padded, state)
    cut = lambda arrays, axis: jax.tree.map(lambda x: lax.slice_in_dim(x, 0, n_tokens, axis=axis), arrays)
    return Output(cut(y, -2), cut(log_z, -1), state)


def _passes(fused: bool) -> Any:
    """The module with the passes: `schedule`, or kernels."""
    if not fused:
        return schedule
    # Slow to import.
    if platform.target() == "tpu":
        from heinsen.ops.pallas import tpu

        return tpu
    from heinsen.ops.pallas import mosaic_gpu

    return mosaic_gpu


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, tokens: Tokens, state: N) -> Output[N]:
    """Output of a whole number of groups."""
    return _forward(call, tokens, state, save_residuals=False)[0]


def _forward(
    call: Call, tokens: Tokens, state: N, save_residuals: bool = True
) -> tuple[Output[N], tuple[Tokens, N, Any, Array]]:
    out, residuals, lost = _passes(call.fused).forward(call, tokens, state, save_residuals)
    if call.exact:
        out = repair.forward(call, tokens, state, lost, out)
    return out, (tokens, state, residuals, lost)


def _backward(call: Call, saved: tuple[Tokens, N, Any, Array], grads: Output[N]) -> tuple[Tokens, N]:
    tokens, state, residuals, lost = saved
    scale = schedule.cotangent_scale(grads)
    fast = _passes(call.fused).backward(call, tokens, state, residuals, grads, scale)
    if not call.exact:
        return fast
    exact = partial(repair.backward, call, tokens, state, lost=lost, grads=grads, scale=scale)
    if not call.fused:
        # The fast pass needs these arrays no longer; they have the right shapes.
        return exact(call.kind.state_like(residuals.before, residuals.shifts.reading), fast=fast)

    def repaired(i: Array, fast: tuple[Tokens, N]) -> tuple[Tokens, N]:
        # Arrays within a loop that hardly ever runs cost nothing, if XLA does not move them out.
        first, _ = lax.optimization_barrier((state, i))
        axis, n_chunks = state.h_z.shift.ndim - 1, call.split.n_chunks
        between = lambda x: jnp.repeat(jnp.expand_dims(x, axis), n_chunks, axis)[None]
        return exact(jax.tree.map(between, first), fast=fast)

    return lax.fori_loop(0, lost.astype(jnp.int32), repaired, fast)


_run.defvjp(_forward, _backward)
