"""Softmax attention with constant cost per token: the public API, and the choice of implementation.

    log y = log S - log Z,   log S = LSE_k(q + LSE_s(k + log v)),   log Z = LSE_k(q + LSE_s(k))          (eqs. 2-4)

Axes: `*batch` any leading axes (a model has [B, H]); T queries, S keys (S = T if causal); K key and V value features.
Arithmetic is in float32, or float64 for float64 inputs; bfloat16 and float16 inputs are taken up to float32.
"""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from heinsen.ops import chunk, reference, scan
from heinsen.ops.checks import check_inputs
from heinsen.ops.linear import LinearState, init_linear_state, linear_attention
from heinsen.ops.sigmoid import sigmoid_attention, sigmoid_attention_cached
from heinsen.ops.states import (
    LogState,
    MeanState,
    State,
    extend_context,
    init_state,
    merge_states,
    query_state,
    update_state,
)

__all__ = [
    "LinearState",
    "LogState",
    "MeanState",
    "attention",
    "extend_context",
    "init_linear_state",
    "init_state",
    "linear_attention",
    "log_attention",
    "merge_states",
    "query_state",
    "sigmoid_attention",
    "sigmoid_attention_cached",
    "update_state",
]

# Each module has log_attention and attention (q, k, values, causal, state, resets) -> (output, state).
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "scan": scan,
    "chunked": chunk,
}


def log_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    log_v: Float[Array, "*batch S V"],
    *,
    causal: bool = True,
    state: LogState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    implementation: str | None = None,
    return_state: bool = False,
) -> Any:
    """log y [*batch, T, V]: the logarithm of the attention of non-negative values given by their logarithms.

    Args:
      q, k, log_v: queries, keys (both exponents: no scaling is applied) and log values; -inf in k masks a key feature,
        -inf in log_v is a value of zero.
      causal: whether query t sees keys up to t only (then S = T), or all keys.
      state: what came before the first token, from an earlier call or `init_state`; all queries of the first document
        see it.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids; `state` continues into the
        first run, and the state returned is the last run's. Needs S = T.
      implementation: "chunked" (matmuls within chunks of tokens, states between them, exact at every dynamic range),
        "scan" (one associative scan over the log-sum-exp monoid, T*K*V memory), "reference" (eq. 1, quadratic), or None
        for the best one for the input.
      return_state: also return the `LogState` after all tokens.

    Returns log y in float32 (float64 for float64 inputs), or (log y, state). A query that sees nothing gets -inf.
    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    return _attend("log_attention", q, k, log_v, causal, state, segment_ids, implementation, return_state)


def attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    causal: bool = True,
    state: MeanState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    implementation: str | None = None,
    return_state: bool = False,
) -> Any:
    """y [*batch, T, V] = softmax(log(exp(q) exp(k)^T)) v for real values of either sign (eq. 1).

    Computed without logarithms of v, as a mixture of running averages whose every weight is at most 1. Arguments and
    errors as in `log_attention`, with a `MeanState`. Returns y in v's dtype (the state in at least float32); a query
    that sees nothing gets 0.
    """
    return _attend("attention", q, k, v, causal, state, segment_ids, implementation, return_state)


def _attend(function, q, k, values, causal, state, segment_ids, implementation, return_state):
    in_logs = function == "log_attention"
    check_inputs(q, k, values, causal, segment_ids, "log_v" if in_logs else "v")
    if state is not None:
        _check_state(state, k, values, LogState if in_logs else MeanState)
    dtype = jnp.promote_types(jnp.result_type(q, k, values), jnp.float32)
    resets = None
    if segment_ids is not None:
        changes = segment_ids[..., 1:] != segment_ids[..., :-1]
        resets = jnp.pad(changes, [(0, 0)] * (changes.ndim - 1) + [(1, 0)])
        resets = jnp.broadcast_to(resets, k.shape[:-1])
    y, end = getattr(_choose(implementation, max(q.shape[-2], k.shape[-2])), function)(
        q.astype(dtype), k.astype(dtype), values.astype(dtype), causal, state, resets
    )
    y = y if in_logs else y.astype(values.dtype)
    return (y, end) if return_state else y


def _choose(implementation: str | None, n_tokens: int) -> ModuleType:
    if implementation is None:
        return chunk if n_tokens > 1 else scan
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {sorted(IMPLEMENTATIONS)} or None")
    return IMPLEMENTATIONS[implementation]


def _check_state(state: State, k, values, kind: type):
    if not isinstance(state, kind):
        raise TypeError(f"state is a {type(state).__name__}: expected a {kind.__name__} (see heinsen.init_state)")
    expected = (*k.shape[:-2], k.shape[-1], values.shape[-1]), (*k.shape[:-2], k.shape[-1])
    if tuple(part.shape for part in state) != expected:
        raise ValueError(
            f"state with shapes {tuple(part.shape for part in state)} does not fit k {k.shape} and values "
            f"{values.shape}: expected {expected}"
        )
