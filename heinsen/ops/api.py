"""Softmax attention with constant cost per token: the public API, and the choice of implementation.

    log y = log S - log Z,   log S = LSE_k(q + LSE_s(k + log v)),   log Z = LSE_k(q + LSE_s(k))          (eqs. 2-4)

Axes: `*batch` any leading axes (a model has [B, H]); T queries, S keys (S = T if causal); K key and V value features.
Arithmetic is in float32, or float64 for float64 inputs; bfloat16 and float16 inputs are taken up to float32. With
bfloat16 values GPUs and TPUs round the factors <= 1 of products to bfloat16, and sum in float32: y is off by at most
2^-7 of sum_s w[t, s] |v[s]| / Z[t], log y by 2^-7.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from heinsen.ops import chunked, reference, scan
from heinsen.ops.arrays import on_automatic_axes, promote_exponents
from heinsen.ops.checks import (
    check_decay,
    check_fits,
    check_implementation,
    check_inputs,
    check_known_tokens,
    check_per_token,
    check_state,
)
from heinsen.ops.decay import with_starts
from heinsen.ops.segments import starts_of_documents
from heinsen.ops.states import LogState, MeanState, State
from heinsen.promotion import usual_promotion

# attend(signed, q, k, values, log_decay, causal, state) -> (y or log y, the state after all tokens): inputs are
# validated, of one floating-point dtype, float32 or wider, but values, and for "pallas" q and k, may be bfloat16;
# log_decay is -inf where a document starts.
Attend = Callable[[bool, Array, Array, Array, Array | None, bool, Any], tuple[Array, Any]]


def _attend_by_kernels(
    signed: bool, q: Array, k: Array, values: Array, log_decay: Array | None, causal: bool, state: Any
) -> tuple[Array, Any]:
    from heinsen.contrib import kernels  # slow to import

    return kernels.attend(signed, q, k, values, log_decay, causal, state)


# Ways to compute both functions.
IMPLEMENTATIONS: dict[str, Attend] = {
    "reference": reference.attend,
    "scan": scan.attend,
    "chunked": chunked.attend,
    "pallas": _attend_by_kernels,
}


class Options(TypedDict, total=False):
    """Arguments of both functions, described in `log_attention`."""

    log_decay: Float[Array, "*batch T"] | None
    causal: bool
    segment_ids: Int[Array, "*#batch T"] | None
    implementation: str | None


class LogOptions(Options, total=False):
    state: LogState | None


class MeanOptions(Options, total=False):
    state: MeanState | None


@overload
def log_attention(
    q: Array, k: Array, log_v: Array, *, return_state: Literal[False] = False, **options: Unpack[LogOptions]
) -> Array: ...
@overload
def log_attention(
    q: Array, k: Array, log_v: Array, *, return_state: Literal[True], **options: Unpack[LogOptions]
) -> tuple[Array, LogState]: ...
@usual_promotion
def log_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    log_v: Float[Array, "*batch S V"],
    *,
    log_decay: Float[Array, "*batch T"] | None = None,
    causal: bool = True,
    state: LogState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    implementation: str | None = None,
    return_state: bool = False,
) -> Float[Array, "*batch T V"] | tuple[Float[Array, "*batch T V"], LogState]:
    """log y [*batch, T, V]: the logarithm of the attention of non-negative values given by their logarithms.

    Args:
      q, k, log_v: queries, keys (both exponents: no scaling is applied) and log values; -inf in k masks a key feature,
        -inf in log_v is a value of zero.
      log_decay: a forget gate. Token t multiplies the weights of all tokens before it by exp(log_decay[t]) <= 1; -inf
        forgets them. For causal attention only: log y is that of q + G and k - G, with G the sums of log_decay, and
        computed without their rounding.
      causal: whether query t sees keys up to t only (then S = T), or all keys.
      state: what came before the first token, from an earlier call or `init_state`; all queries of the first document
        see it.
      segment_ids: packed documents, [T] or with an axis for each of [*batch, T], such as [B, 1, T] for all heads.
        Tokens see each other only within a run of equal ids; `state` continues into the first run, and the state
        returned is the last run's. Needs S = T.
      implementation: "chunked" (matmuls within chunks of tokens, states between them, exact at every dynamic range),
        "pallas" (one kernel for each pass, on Hopper GPUs: heads of at most 64 features, in float32, gradients but no
        other derivatives; never chosen by itself, and "chunked" where causal=False), "scan" (one associative scan over
        the log-sum-exp monoid, `T*K*V` memory), "reference" (eq. 1, quadratic), or None for the best one for the input.
      return_state: also return the `LogState` after all tokens.

    Returns log y in float32 (float64 for float64 inputs), or (log y, state). A query that sees nothing gets -inf.
    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit or what "pallas" does
    not take.
    """
    _check(q, k, log_v, "log_v", log_decay, causal, segment_ids, state, LogState)
    log_y, end = _attend(False, q, k, log_v, log_decay, causal, state, segment_ids, implementation)
    return (log_y, end) if return_state else log_y


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_state: Literal[False] = False, **options: Unpack[MeanOptions]
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_state: Literal[True], **options: Unpack[MeanOptions]
) -> tuple[Array, MeanState]: ...
@usual_promotion
def attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    log_decay: Float[Array, "*batch T"] | None = None,
    causal: bool = True,
    state: MeanState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
    implementation: str | None = None,
    return_state: bool = False,
) -> Float[Array, "*batch T V"] | tuple[Float[Array, "*batch T V"], MeanState]:
    """y [*batch, T, V] = softmax(log(exp(q) exp(k)^T)) v for real values of either sign (eq. 1).

    Computed without logarithms of v, as a mixture of running averages whose every weight is at most 1. Arguments and
    errors as in `log_attention`, with a `MeanState`. Returns y in v's dtype (the state in at least float32); a query
    that sees nothing gets 0.
    """
    _check(q, k, v, "v", log_decay, causal, segment_ids, state, MeanState)
    y, end = _attend(True, q, k, v, log_decay, causal, state, segment_ids, implementation)
    y = y.astype(v.dtype)
    return (y, end) if return_state else y


@usual_promotion
def attend_both_ways(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch T K"],
    values: Float[Array, "*batch T V"],
    *,
    log_decay: Float[Array, "*batch T"],
    log_decay_after: Float[Array, "*batch T"],
    segment_ids: Int[Array, "*#batch T"] | None = None,
    signed: bool,
) -> Float[Array, "*batch T V"]:
    """Attention over the whole document with a forget gate for each direction: y if `signed`, else log y of log values.

    Key s counts exp(sum of log_decay[r], s < r <= t) at query t >= s, and exp(sum of log_decay_after[r], t < r < s) at
    query t < s. -inf in either forgets all on its side. For models: dtypes, other arguments and errors are those of
    `log_attention` and `attention`.
    """
    check_inputs(q, k, values, True, segment_ids, "v" if signed else "log_v")
    check_per_token("log_decay", log_decay, k)
    check_per_token("log_decay_after", log_decay_after, k)
    arrays, starts = promote_exponents(q, k, values), starts_of_documents(segment_ids, k)
    before = with_starts(log_decay, starts, arrays[1])
    assert before is not None
    y, _ = chunked.attend_both_ways(signed, *arrays, before, log_decay_after, starts, None)
    return y.astype(values.dtype) if signed else y


def _check(
    q: Array,
    k: Array,
    values: Array,
    name: str,
    log_decay: Array | None,
    causal: bool,
    segment_ids: Array | None,
    state: State | None,
    kind: type[State],
) -> None:
    check_inputs(q, k, values, causal, segment_ids, name)
    check_decay("log_decay", log_decay, k, causal)
    if state is not None:
        check_state("state", state, kind)
        check_fits(state, ((*k.shape[:-2], k.shape[-1], values.shape[-1]), (*k.shape[:-2], k.shape[-1])), k, values)


def _attend(
    signed: bool,
    q: Array,
    k: Array,
    values: Array,
    log_decay: Array | None,
    causal: bool,
    state: State | None,
    segment_ids: Array | None,
    implementation: str | None,
) -> tuple[Array, Any]:
    """Run the implementation of this name, or the best one."""
    if implementation is None:
        implementation = "scan" if q.shape[-2] == k.shape[-2] == 1 else "chunked"
    check_implementation(implementation, IMPLEMENTATIONS)
    if implementation != "reference":
        check_known_tokens(q.shape[-2], k.shape[-2])
    promoted_q, promoted_k, values = promote_exponents(q, k, values)
    log_decay = with_starts(log_decay, starts_of_documents(segment_ids, k), promoted_k)
    if implementation != "pallas" or not q.dtype == k.dtype == jnp.bfloat16:  # which kernels read as they are
        q, k = promoted_q, promoted_k

    def attend(q: Array, k: Array, values: Array, log_decay: Array | None, state: Any) -> tuple[Array, Any]:
        return IMPLEMENTATIONS[implementation](signed, q, k, values, log_decay, causal, state)

    return on_automatic_axes(attend, q, k, values, log_decay, state)
