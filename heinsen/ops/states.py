"""States: what a set of tokens leaves behind, of one size whatever their number. Equations (5) to (8) of the paper.

    state       holds                                           values  used for
    LogState    h_s = LSE_s(k + log v), h_z = LSE_s(k)          log     the public form, eqs. (5) to (8)
    MeanState   mean of v under weights exp(k - h_z), and h_z   real    the public form
    Summary     sums relative to shifts                         both    within calls of `chunked`

States are commutative monoids under `merge`, with the empty state (h = -inf) as identity. `decay` multiplies all
weights, as a forget gate does; with it the order of merging matters, older before newer (`merge_states`). All functions
are pure and differentiable, at -inf too.

Axes: K key features, V value features, T queries; `*batch` is any leading axes, the same in every argument.
"""

from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from heinsen.logspace import (
    NEG_INF,
    centered_sum,
    finite,
    log_divide,
    log_shares,
    logaddexp,
    logsumexp,
    posterior,
)
from heinsen.ops.arrays import safe_divide, safe_log
from heinsen.ops.checks import check_array, check_float, check_state
from heinsen.promotion import usual_promotion


class LogState(NamedTuple):
    """State of `log_attention`: h_s = LSE_s(k + log v), h_z = LSE_s(k), over the tokens s seen (-inf: none).

    Both are rounded to their size: log y is off by some 1e-7 |h|.
    """

    h_s: Float[Array, "*batch K V"]
    h_z: Float[Array, "*batch K"]

    @staticmethod
    def of_token(k: Float[Array, "*batch K"], values: Float[Array, "*batch V"]) -> "LogState":
        return LogState(k[..., :, None] + values[..., None, :], k)

    def merge(self, other: "LogState") -> "LogState":
        return LogState(logaddexp(self.h_s, other.h_s), logaddexp(self.h_z, other.h_z))

    def decay(self, log_decay: Float[Array, "*batch"]) -> "LogState":
        """State of the same tokens, their weights multiplied by exp(log_decay); -inf gives the empty state."""
        return LogState(_scale(self.h_s, log_decay[..., None, None]), _scale(self.h_z, log_decay[..., None]))

    def read(self, q: Float[Array, "*batch T K"]) -> Float[Array, "*batch T V"]:
        """log y of queries."""
        return read_means(
            q, self.h_z[..., None, :], log_divide(self.h_s, self.h_z[..., None])[..., None, :, :], signed=False
        )


class MeanState(NamedTuple):
    """State of `attention`: each key feature's running mean of the values, with weights exp(k - h_z), and h_z."""

    mean: Float[Array, "*batch K V"]
    h_z: Float[Array, "*batch K"]

    @staticmethod
    def of_token(k: Float[Array, "*batch K"], values: Float[Array, "*batch V"]) -> "MeanState":
        return MeanState(jnp.broadcast_to(values[..., None, :], (*k.shape, values.shape[-1])), k)

    def merge(self, other: "MeanState") -> "MeanState":
        share, other_share = (jnp.exp(x)[..., None] for x in log_shares(self.h_z, other.h_z))
        return MeanState(share * self.mean + other_share * other.mean, logaddexp(self.h_z, other.h_z))

    def decay(self, log_decay: Float[Array, "*batch"]) -> "MeanState":
        """State of the same tokens, their weights multiplied by exp(log_decay); -inf gives the empty state."""
        mean = jnp.where((log_decay == NEG_INF)[..., None, None], 0.0, self.mean)
        return MeanState(mean, _scale(self.h_z, log_decay[..., None]))

    def read(self, q: Float[Array, "*batch T K"]) -> Float[Array, "*batch T V"]:
        """y of queries."""
        return read_means(q, self.h_z[..., None, :], self.mean[..., None, :, :], signed=True)


# Underflow takes at most 1e-38 per term from a sum of some 1e4 terms: sums of at least 1e-27 are right to 1e-7.
SMALLEST_SUM = 1e-27


class Summary(NamedTuple):
    """Sums over tokens, relative to shifts: what they leave behind, within calls.

    s sums exp(k + log v - c - b), or exp(k - c) v, and z sums exp(k - c). The largest weight of each key feature is 1.
    """

    s: Float[Array, "*batch K V"]
    z: Float[Array, "*batch K"]
    c: Float[Array, "*batch K"]  # the largest exponent of each key feature; -inf before any token
    b: Float[Array, "*batch V"] | None  # at least each log value plus the log of its largest weight; None: real values

    @classmethod
    def of(cls, state: "LogState | MeanState") -> "Summary":
        """The sums of a state."""
        c = lax.stop_gradient(state.h_z)
        z = jnp.exp(jnp.where(c == NEG_INF, NEG_INF, state.h_z - finite(c)))
        if isinstance(state, MeanState):
            return cls(state.mean * z[..., None], z, c, None)
        log_mean = state.h_s - finite(c)[..., None]
        b = lax.stop_gradient(jnp.max(log_mean, axis=-2))
        return cls(jnp.exp(log_mean - finite(b)[..., None, :]), z, c, b)

    def to_state(self) -> "LogState | MeanState":
        h_z = jnp.where(self.z == 0, NEG_INF, safe_log(self.z) + finite(self.c))
        if self.b is None:
            return MeanState(safe_divide(self.s, self.z[..., None]), h_z)
        shift = finite(self.c)[..., :, None] + finite(self.b)[..., None, :]
        return LogState(jnp.where(self.s == 0, NEG_INF, safe_log(self.s) + shift), h_z)

    def merge(self, log_decay: Float[Array, "*batch"], newer: "Summary") -> "Summary":
        """The sums of both, the weights of these ones multiplied by exp(log_decay) <= 1. Shifts are constants.

        Where all weights of a part become smaller, what its values add does too: b falls by as much as the largest.
        """
        c = lax.stop_gradient(jnp.maximum(self.c + log_decay[..., None], newer.c))
        kept, added = log_rescaling(self.c, c, log_decay[..., None]), log_rescaling(newer.c, c)
        z = self.z * jnp.exp(kept) + newer.z * jnp.exp(added)
        if self.b is None or newer.b is None:
            return Summary(self.s * jnp.exp(kept)[..., None] + newer.s * jnp.exp(added)[..., None], z, c, None)
        tops = [jnp.max(x, axis=-1, keepdims=True) for x in (kept, added)]
        b = lax.stop_gradient(jnp.maximum(self.b + tops[0], newer.b + tops[1]))
        s = jnp.zeros((), z.dtype)
        for part, old, x, top in ((self.s, self.b, kept, tops[0]), (newer.s, newer.b, added, tops[1])):
            rows, columns = jnp.exp(x - finite(top)), jnp.exp(log_rescaling(old, b, top))
            s = s + (part * rows[..., None]) * columns[..., None, :]
        return Summary(s, z, c, b)

    def lost_terms(self) -> Array:
        """Whether a sum may have lost terms, [*batch]."""
        return lost_terms(self.s, self.z, self.b)


def lost_terms(s: Array, z: Array, b: Array | None) -> Array:
    """Whether underflow may have taken terms that matter from sums [*batch, N, V] of log values with a shift b.

    Returns [*batch]. z [*batch, N] are the sums of weights.
    """
    if b is None:
        return jnp.zeros(z.shape[:-1], bool)
    can_be_zero = (z == 0)[..., None] | (b == NEG_INF)[..., None, :]
    return lax.stop_gradient(jnp.any((s < SMALLEST_SUM) & ~can_be_zero, axis=(-2, -1)))


def log_rescaling(old: Array, new: Array, log_decay: Array | float = 0.0) -> Array:
    """Logarithm of the factor <= 1 that takes what is relative to `old` to `new` >= old + log_decay.

    Differences of shifts are exact where their sums with a decay would be rounded.
    """
    return jnp.where(old == NEG_INF, NEG_INF, (finite(old) - finite(new)) + log_decay)


State = LogState | MeanState
AnyState = TypeVar("AnyState", LogState, MeanState)


# ---- public functions -----------------------------------------------------------------------------


@overload
def init_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, *, signed: Literal[False] = False, dtype: Any = jnp.float32
) -> LogState: ...
@overload
def init_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, *, signed: Literal[True], dtype: Any = jnp.float32
) -> MeanState: ...
@overload
def init_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, *, signed: bool, dtype: Any = jnp.float32
) -> State: ...
def init_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, *, signed: bool = False, dtype: Any = jnp.float32
) -> State:
    """The state before any token: a `LogState`, or a `MeanState` if `signed`.

    Its log-sums are -inf, so that eq. (6) agrees with eq. (4). The paper's eq. (7) writes zeros; that state, which
    amounts to one more token with k = 0 and log v = 0, is `LogState(jnp.zeros(...), jnp.zeros(...))`.
    Raises TypeError for a dtype that is not floating point.
    """
    check_float("the state", dtype)
    h_z = jnp.full((*batch_shape, d_key), NEG_INF, dtype)
    if signed:
        return MeanState(jnp.zeros((*batch_shape, d_key, d_value), dtype), h_z)
    return LogState(jnp.full((*batch_shape, d_key, d_value), NEG_INF, dtype), h_z)


@usual_promotion
def update_state(
    state: AnyState,
    k: Float[Array, "*batch K"],
    values: Float[Array, "*batch V"],
    *,
    log_decay: Float[Array, "*batch"] | None = None,
) -> AnyState:
    """Eq. (6): the state after one more token, in its dtype. `values` are log v for a `LogState`, v for a `MeanState`.

    log_decay: logarithm, at most 0, of what is left of the weights of the tokens before it (-inf: nothing).

    For many tokens at once use `log_attention(..., state=state, return_state=True)`. Raises TypeError for what
    is no state or no floating-point array, ValueError for shapes that do not fit.
    """
    _check_state(state)
    check_array("k", k)
    check_array("values", values)
    if k.shape != state.h_z.shape or values.shape != state[0].shape[:-2] + state[0].shape[-1:]:
        raise ValueError(
            f"k {k.shape} and the token's values {values.shape} do not fit a state for k {state.h_z.shape} and values "
            f"{state[0].shape[:-2] + state[0].shape[-1:]}: update_state takes one token, with the state's leading axes"
        )
    after = merge_states(state, state.of_token(k, values), log_decay=log_decay)
    return jax.tree.map(lambda x, before: x.astype(before.dtype), after, state)


@usual_promotion
def merge_states(older: AnyState, newer: AnyState, *, log_decay: Float[Array, "*batch"] | None = None) -> AnyState:
    """The state of two disjoint sets of tokens together: associative, with `init_state` as identity.

    log_decay: the sum of the newer tokens' log decays, which multiply the weights of all older ones. The states are
    pairs (log_decay, state) of a monoid, in which the order matters:
    (a, x) (b, y) = (a + b, merge_states(x, y, log_decay=b)). Without it the order does not matter.

    Of two dtypes the result has the wider one. Raises TypeError for what is no state or of different kinds, ValueError
    for states of different shapes and a log_decay that does not fit.
    """
    _check_state(older, "older")
    _check_state(newer, "newer")
    if type(older) is not type(newer):
        raise TypeError(
            f"states of different kinds cannot be merged: {type(older).__name__} and {type(newer).__name__}"
        )
    shapes = [tuple(x.shape for x in state) for state in (older, newer)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"states of different shapes cannot be merged: {shapes[0]} and {shapes[1]}")
    if log_decay is None:
        return older.merge(newer)
    check_array("log_decay", log_decay)
    if log_decay.shape != newer.h_z.shape[:-1]:
        raise ValueError(
            f"log_decay {log_decay.shape} does not fit states with h_z {newer.h_z.shape}: expected one number for each "
            f"of their leading axes, {newer.h_z.shape[:-1]}"
        )
    return older.decay(log_decay.astype(older.h_z.dtype)).merge(newer)


@usual_promotion
def query_state(state: State, q: Float[Array, "*batch K"] | Float[Array, "*batch T K"]) -> Array:
    """Eqs. (5) and (8): what one query [*batch, K], or T queries [*batch, T, K], read from a state.

    Returns log y [*batch, (T,) V] from a `LogState`, y from a `MeanState`. An empty state gives -inf, or 0. Raises
    TypeError for what is no state or no floating-point array, ValueError for shapes that do not fit.
    """
    _check_state(state)
    check_array("q", q)
    if q.ndim == state.h_z.ndim:
        return query_state(state, q[..., None, :])[..., 0, :]
    if q.shape[:-2] + q.shape[-1:] != state.h_z.shape:
        raise ValueError(f"queries {q.shape} do not fit a state with h_z {state.h_z.shape}: expected [*batch, (T,) K]")
    return state.read(q)


@usual_promotion
def extend_context(
    state: AnyState,
    k: Float[Array, "*batch K"],
    values: Float[Array, "*batch V"],
    q: Float[Array, "*batch T K"],
    *,
    log_decay: Float[Array, "*batch"] | None = None,
) -> tuple[Array, AnyState]:
    """Eq. (8): what T queries read once one more token is in their context, and the state with it.

    Equals `log_attention(..., causal=False)` of the whole context (`attention`, for a `MeanState`), at a cost that is
    independent of the context's length. Arguments and errors as in `update_state` and `query_state`.
    """
    state = update_state(state, k, values, log_decay=log_decay)
    return query_state(state, q), state


def _check_state(state: Any, name: str = "state") -> None:
    check_state(name, state, LogState, MeanState)
    if state[0].ndim < 2 or state[0].shape[:-1] != state.h_z.shape:
        raise ValueError(
            f"{name} has shapes {tuple(x.shape for x in state)}: expected those of heinsen.init_state, [*batch, K, V] "
            "and [*batch, K]"
        )


# ---- arithmetic ------------------------------------------------------------------------------------


def read_means(
    q: Float[Array, "*batch T K"],
    h_z: Float[Array, "*batch #T K"],
    means: Float[Array, "*batch #T K V"],
    signed: bool,
) -> Float[Array, "*batch T V"]:
    """Mean over key features of their means, with the weights exp(q + h_z); of logarithms, the logarithm of that."""
    log_weights, _ = centered_sum(q, h_z)
    if not signed:
        return _log_mean(log_weights, means)
    weights = posterior(log_weights, logsumexp(log_weights, axis=-1)[..., None])
    return jnp.sum(weights[..., None] * means, axis=-2)


def _scale(h: Array, log_factor: Array) -> Array:
    """h + log_factor, and -inf where that is -inf, also for h = NaN."""
    return jnp.where(log_factor == NEG_INF, NEG_INF, h + log_factor)


@jax.custom_jvp
def _log_mean(log_weights: Array, log_x: Array) -> Array:
    """Log of the mean of x [*batch, K, V] by weights [*batch, K]: LSE_k(log_weights + log_x) - LSE_k(log_weights)."""
    log_s, log_z = _log_sums(log_weights, log_x)
    return log_divide(log_s, log_z)


def _log_sums(log_weights: Array, log_x: Array) -> tuple[Array, Array]:
    return logsumexp(log_weights[..., None] + log_x, axis=-2), logsumexp(log_weights, axis=-1)[..., None]


@_log_mean.defjvp
@usual_promotion
def _log_mean_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (log_weights, log_x), (dweights, dx) = primals, tangents
    log_s, log_z = _log_sums(log_weights, log_x)
    p, p_x = posterior(log_weights, log_z), posterior(log_weights[..., None] + log_x, log_s[..., None, :])
    # A shift of all weights leaves the mean as it is (except for means of zeros alone). Where weights and x hardly
    # differ, the rest of a derivative is small beside the rounding error of the shift, which is left out.
    shift = jnp.sum(p * dweights, axis=-1, keepdims=True)
    d = jnp.sum((p_x - p[..., None]) * (dweights - shift)[..., None] + p_x * dx, axis=-2)
    d = d - jnp.where(log_s == NEG_INF, shift, 0.0)
    return log_divide(log_s, log_z), jnp.where(log_z == NEG_INF, 0.0, d)
