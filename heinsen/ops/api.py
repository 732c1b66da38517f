"""Softmax attention with constant cost per token: the public API, and the choice of implementation.

    log y = log S - log Z,   log S = LSE_k(q + LSE_s(k + log v)),   log Z = LSE_k(q + LSE_s(k))          (eqs. 2-4)

Axes: `*batch` any leading axes (a model has [B, H]); T queries, S keys (S = T if causal); K key and V value features.
Arithmetic is in float32, or float64 for float64 inputs; bfloat16 and float16 inputs are taken up to float32.
"""

from functools import partial
from typing import Literal, overload

from jaxtyping import Array, Float, Int

from heinsen.ops import chunked, reference, scan
from heinsen.ops.checks import check_fits, check_state
from heinsen.ops.inputs import check_known_tokens, check_log_decay, on_automatic_axes, prepare_inputs
from heinsen.ops.nonfinite import Attend, isolate_non_finite
from heinsen.ops.states import LogState, MeanState, State
from heinsen.ops.values import LOG_DOMAIN, REAL_DOMAIN

# Ways to compute both functions: (kind of values, q, k, values, causal, state, resets, log_decay) -> (output, the state
# after all tokens). Inputs are validated, of one floating-point dtype, float32 or wider.
IMPLEMENTATIONS: dict[str, Attend] = {
    "reference": isolate_non_finite(reference.attend),
    "scan": isolate_non_finite(scan.attend),
    "chunked": chunked.attend,
    "pallas": partial(chunked.attend, fused=True),
}


@overload
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
    return_state: Literal[False] = False,
) -> Float[Array, "*batch T V"]: ...
@overload
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
    return_state: Literal[True],
) -> tuple[Float[Array, "*batch T V"], LogState]: ...
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
        "pallas" (the same as one kernel for each pass: on TPUs, and for heads of at most 64 features on Hopper GPUs; in
        float32; never chosen by itself),
        "scan" (one associative scan over the log-sum-exp monoid, `T*K*V` memory), "reference" (eq. 1, quadratic), or
        None for the best one for the input. All have gradients (`jax.grad`), and these derivatives in forward mode;
        "scan" and "reference" have all others (`jax.jvp`, `jax.linearize`, `jax.hessian`, `jax.grad` twice).
      return_state: also return the `LogState` after all tokens.

    Returns log y in float32 (float64 for float64 inputs), or (log y, state). A query that sees nothing gets -inf.
    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit or what "pallas" does
    not take.
    """
    arrays, resets, log_decay = prepare_inputs(q, k, log_v, log_decay, causal, segment_ids, "log_v")
    _check_state(state, k, log_v, LogState)
    run = _choose(implementation, q.shape[-2], k.shape[-2])
    attend = lambda q, k, log_v, state, resets, log_decay: run(
        LOG_DOMAIN, q, k, log_v, causal, state, resets, log_decay
    )
    log_y, end = on_automatic_axes(attend, *arrays, state, resets, log_decay)
    return (log_y, end) if return_state else log_y


@overload
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
    return_state: Literal[False] = False,
) -> Float[Array, "*batch T V"]: ...
@overload
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
    return_state: Literal[True],
) -> tuple[Float[Array, "*batch T V"], MeanState]: ...
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
    arrays, resets, log_decay = prepare_inputs(q, k, v, log_decay, causal, segment_ids, "v")
    _check_state(state, k, v, MeanState)
    run = _choose(implementation, q.shape[-2], k.shape[-2])
    attend = lambda q, k, v, state, *decay: run(REAL_DOMAIN, q, k, v, causal, state, *decay)
    y, end = on_automatic_axes(attend, *arrays, state, resets, log_decay)
    y = y.astype(v.dtype)
    return (y, end) if return_state else y


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
    `log_attention` and `attention`; there is no forward-mode derivative.
    """
    (q, k, in_float), starts, _ = prepare_inputs(q, k, values, None, True, segment_ids, "v" if signed else "log_v")
    decays = []
    for name, each in (("log_decay", log_decay), ("log_decay_after", log_decay_after)):
        check_log_decay(each, k, causal=True, name=name)
        decays.append(each.astype(k.dtype))
    domain = REAL_DOMAIN if signed else LOG_DOMAIN
    y = chunked.attend_both_ways(domain, q, k, in_float, starts, *decays)
    return y.astype(values.dtype) if signed else y


def _choose(implementation: str | None, n_queries: int, n_keys: int) -> Attend:
    if implementation is None:
        implementation = "scan" if n_queries == n_keys == 1 else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {sorted(IMPLEMENTATIONS)} or None")
    if implementation != "reference":
        check_known_tokens(n_queries, n_keys)
    return IMPLEMENTATIONS[implementation]


def _check_state(state: State | None, k: Array, values: Array, kind: type[State]) -> None:
    if state is not None:
        check_state("state", state, kind)
        check_fits(state, ((*k.shape[:-2], k.shape[-1], values.shape[-1]), (*k.shape[:-2], k.shape[-1])), k, values)
