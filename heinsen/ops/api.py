"""Softmax attention with constant cost per token: the public API, and the choice of implementation.

    log y = log S - log Z,   log S = LSE_k(q + LSE_s(k + log v)),   log Z = LSE_k(q + LSE_s(k))          (eqs. 2-4)

Axes: `*batch` any leading axes (a model has [B, H]); T queries, S keys (S = T if causal); K key and V value features.
Arithmetic is in float32, or float64 for float64 inputs; bfloat16 and float16 inputs are taken up to float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from heinsen.ops import chunked, reference, scan
from heinsen.ops.checks import ARRAYS, check_array, check_fits, check_float, check_integer, check_state, not_an_array
from heinsen.ops.chunk import Keys
from heinsen.ops.decay import take_resets
from heinsen.ops.documents import document_starts
from heinsen.ops.exact import Attend, isolate_nonfinite
from heinsen.ops.states import LogState, MeanState, State
from heinsen.ops.values import LOG_DOMAIN, REAL_DOMAIN

# Ways to compute both functions.
IMPLEMENTATIONS: dict[str, Attend] = {
    "reference": isolate_nonfinite(reference.attend),
    "scan": isolate_nonfinite(scan.attend),
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
        float32; never chosen by itself, and "chunked" where causal=False),
        "scan" (one associative scan over the log-sum-exp monoid, `T*K*V` memory), "reference" (eq. 1, quadratic), or
        None for the best one for the input. All have gradients, and `jax.jvp` of `jax.grad`; "scan" and "reference"
        also have forward mode and higher derivatives (`jax.jvp`, `jax.linearize`, `jax.hessian`, `jax.grad` twice).
      return_state: also return the `LogState` after all tokens.

    Returns log y in float32 (float64 for float64 inputs), or (log y, state). A query that sees nothing gets -inf.
    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit or what "pallas" does
    not take.
    """
    arrays, resets, log_decay = prepare_inputs(q, k, log_v, log_decay, causal, segment_ids, "log_v")
    _check_state(state, k, log_v, LogState)
    chosen = _choose(implementation, q.shape[-2], k.shape[-2])

    def attend(q: Array, k: Array, log_v: Array, state: Any, resets: Any, log_decay: Any) -> tuple[Array, Any]:
        return chosen(LOG_DOMAIN, q, Keys.of_tokens(k, log_v, resets, log_decay), causal, state)

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
    chosen = _choose(implementation, q.shape[-2], k.shape[-2])

    def attend(q: Array, k: Array, v: Array, state: Any, resets: Any, log_decay: Any) -> tuple[Array, Any]:
        return chosen(REAL_DOMAIN, q, Keys.of_tokens(k, v, resets, log_decay), causal, state)

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
    (q, k, promoted), resets, _ = prepare_inputs(q, k, values, None, True, segment_ids, "v" if signed else "log_v")
    decays = []
    for name, each in (("log_decay", log_decay), ("log_decay_after", log_decay_after)):
        check_per_token(name, each, k)
        decays.append(each.astype(k.dtype))
    domain = REAL_DOMAIN if signed else LOG_DOMAIN
    y = chunked.attend_both_ways(domain, q, k, promoted, resets, *decays)
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


# ---- for every attention function ----------------------------------------------------------------


def prepare_inputs(
    q: Array,
    k: Array,
    values: Array,
    log_decay: Array | None,
    causal: bool,
    segment_ids: Array | None,
    values_name: str,
) -> tuple[tuple[Array, Array, Array], Array | None, Array | None]:
    """(q, k and values in the dtype of the arithmetic, resets [*batch, T], log_decay), validated: see `check_inputs`.

    resets is true where a token erases all earlier ones: a document starts, or log_decay is -inf (returned as 0 there).
    """
    check_inputs(q, k, values, causal, segment_ids, values_name)
    dtype = jnp.promote_types(jnp.result_type(q, k, values), jnp.float32)
    resets = None
    if segment_ids is not None:
        resets = jnp.broadcast_to(document_starts(segment_ids), k.shape[:-1])
    if log_decay is not None:
        check_per_token("log_decay", log_decay, k)
        if not causal:
            raise ValueError(
                "log_decay with causal=False: a token's decay acts on those before it, and without a causal mask none "
                "is before another; leave out log_decay, or attend in both directions with a gate for each by "
                "heinsen.ops.api.attend_both_ways"
            )
        resets, log_decay = take_resets(resets, log_decay.astype(dtype))
    return (q.astype(dtype), k.astype(dtype), values.astype(dtype)), resets, log_decay


def check_inputs(q: Array, k: Array, values: Array, causal: bool, segment_ids: Array | None, values_name: str) -> None:
    """Check that q [*batch, T, K], k [*batch, S, K], values [*batch, S, V] and segment_ids fit each other.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes; they call values `values_name`.
    """
    for name, x in (("q", q), ("k", k), (values_name, values)):
        if not isinstance(x, ARRAYS):
            raise not_an_array(name, type(x))
        check_float(name, x.dtype)
        if x.ndim < 2 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: expected [*batch, tokens, features], none of them empty")
    shapes = f"q {q.shape}, k {k.shape}, {values_name} {values.shape}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in their last axis, the number of key features: {shapes}")
    if k.shape[-2] != values.shape[-2]:
        raise ValueError(f"k and {values_name} differ in their number of tokens (axis -2): {shapes}")
    if not q.shape[:-2] == k.shape[:-2] == values.shape[:-2]:
        raise ValueError(f"q, k and {values_name} differ in their leading axes: {shapes}")
    if q.shape[-2] != k.shape[-2]:
        if causal:
            raise ValueError(f"causal attention needs as many queries as keys: {shapes}; pass causal=False")
        if segment_ids is not None:
            raise ValueError(f"segment_ids need as many queries as keys: {shapes}")
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, check_integer)
        if 1 < segment_ids.ndim < k.ndim - 1:  # [B, T] would be taken for heads where there are as many as B
            axes = ", ".join([":", *["None"] * (k.ndim - 1 - segment_ids.ndim), ":"])
            raise ValueError(
                f"segment_ids {segment_ids.shape} for k {k.shape}: expected [T], or an axis for each of [*batch, T]; "
                f"where all heads have the same documents, [B, 1, T]: pass segment_ids[{axes}]"
            )
        try:
            fits = jnp.broadcast_shapes(segment_ids.shape, k.shape[:-1]) == k.shape[:-1]
            fits = fits and segment_ids.shape[-1:] == k.shape[-2:-1]
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"segment_ids {segment_ids.shape} do not broadcast to [*batch, T] = {k.shape[:-1]}")


def check_known_tokens(*numbers: int) -> None:
    """Raise ValueError where a number of tokens is symbolic (`jax.export`)."""
    for n_tokens in numbers:
        if not isinstance(n_tokens, int):
            raise ValueError(
                f"a symbolic number of tokens, {n_tokens}, where this attention needs a known one: export a function "
                "for each length (the batch may be symbolic), or pass implementation='reference' where there is one"
            )


def check_per_token(name: str, x: Array, k: Array) -> None:
    """x [*batch, T], one number for each of the keys k [*batch, T, K]; the caller calls it `name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    check_array(name, x)
    if x.shape != k.shape[:-1]:
        raise ValueError(
            f"{name} {x.shape} does not fit k {k.shape}: expected one number for each head and token, "
            f"[*batch, T] = {k.shape[:-1]}"
        )


def on_automatic_axes(function: Callable[..., tuple[Array, Any]], q: Array, *args: Any) -> tuple[Array, Any]:
    """function(q, *args), whose outputs are y [*batch, T, V] and a tree of arrays [*batch, ...], on any mesh.

    Where q [*batch, T, K] lies on a mesh with explicit axes, the compiler divides the work within, and the outputs are
    divided as q is.
    """
    sharding = jax.typeof(q).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(q, *args)
    axes: list[Any] = [*sharding.spec] + [None] * (q.ndim - len(sharding.spec))
    *batch, tokens, _ = axes
    return jax.sharding.auto_axes(function, out_sharding=(P(*batch, tokens), P(*batch)))(q, *args)
