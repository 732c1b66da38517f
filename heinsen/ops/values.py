"""Log and real values: the two kinds of values that the chunked form sums, and all that differs between them.

Log values are non-negative numbers given by their logarithms; their sums are kept relative to a shift b. Real
values have either sign and need no shift: there b is None. Each kind supplies the factor that enters a matmul, the
mean that a query reads and the gradients of both, so that all others are written once.

Axes: K key features, V value features, T tokens or queries; `*batch` is any leading axes.
"""

import abc
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen.logspace import NEG_INF, ShiftedLog, finite, log_divide
from heinsen.ops.states import NormalizedMeanState, NormalizedState, init_state

# Underflow takes at most 1e-38 per term from a scaled sum, and a sum has some 1e4 terms: the tokens of a chunk and its
# state, times K. Sums of at least 1e-27 are then right to 1e-7, float32's rounding (docs/attention.md).
SMALLEST_SUM = 1e-27

# Without HIGHEST, TPUs and GPUs round float32 factors to bfloat16 or TF32.
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)

StateT = TypeVar("StateT", NormalizedState, NormalizedMeanState)


class Shifts(NamedTuple):
    """Numbers that sums are relative to, so that no term exceeds 1; -inf before any token.

    c is the largest exponent of each key feature, b at least every log value plus the log of its largest weight.
    """

    c: Array  # [*batch, K]
    b: Array | None  # [*batch, V]; None for real values


class Sums(NamedTuple):
    """Sums over keys of weights times values, and of weights: in a state for each key feature, else for each query."""

    s: Array  # [*batch, K or T, V]
    z: Array  # [*batch, K or T]


class Summary(NamedTuple):
    """Sums over tokens, relative to shifts: all that they leave behind. The largest weight of each key feature is 1."""

    sums: Sums
    shifts: Shifts


class Domain(abc.ABC, Generic[StateT]):
    """How one kind of values enters sums and is read from them. Instances have no data: compare them by identity."""

    zero: float  # the number that stands for a value of 0
    can_lose_terms: bool  # whether underflow of a value matters
    grad_overwrites_sums: bool  # whether XLA writes the gradient of the values over the buffer of S without a copy

    @abc.abstractmethod
    def empty_state(self, k: Array, values: Array) -> StateT:
        """Normalized state before any of the tokens k [*batch, T, K], values [*batch, T, V]."""

    @abc.abstractmethod
    def value_shift(self, values: Array) -> Array | None:
        """The shift b of values [*batch, T, V], their largest; None for real values."""

    @abc.abstractmethod
    def factor(self, values: Array, b: Array | None) -> Array:
        """vf [*batch, T, V], which the weights multiply: exp(log v - b) <= 1, or v itself."""

    @abc.abstractmethod
    def factor_grad(self, vf: Array, dvf: Array) -> Array:
        """Gradient of the values from that of their factor."""

    @abc.abstractmethod
    def mean(self, sums: Sums, b: Array | None) -> Array:
        """Output of queries: log s - log z + b, or s / z; -inf, or 0, where nothing is summed."""

    @abc.abstractmethod
    def mean_grad(self, sums: Sums, dmean: Array) -> Sums:
        """Gradients of s and z from that of the `mean`."""

    @abc.abstractmethod
    def always_zero_grad(self, dy: Array, b: Array | None) -> Array | float:
        """Sum [*batch, T] of dy over the columns whose values were all zero: there S is 0, only Z has a gradient."""

    @abc.abstractmethod
    def is_exact(self, sums: Sums, b: Array | None) -> Array:
        """Whether underflow cannot have taken terms that matter from any s [*batch, T or K, V], nor is one NaN."""

    @abc.abstractmethod
    def is_value(self, values: Array) -> Array:
        """Whether numbers are values, neither NaN nor infinite."""

    @abc.abstractmethod
    def to_state(self, summary: Summary) -> StateT:
        """Normalized state of a summary."""

    @abc.abstractmethod
    def to_summary(self, state: StateT) -> Summary:
        """Summary of a normalized state, relative to its log weights and its largest mean, which are constants."""

    @abc.abstractmethod
    def sum_tokens(self, log_weights: Array, values: Array) -> tuple[Sums, Array | None]:
        """Sums over T tokens with log_weights [*batch, T, K] <= 0, and the shift b of the sums."""


class LogValues(Domain[NormalizedState]):
    """Non-negative values, given by their logarithms."""

    zero, can_lose_terms, grad_overwrites_sums = NEG_INF, True, True

    def empty_state(self, k: Array, values: Array) -> NormalizedState:
        return init_state(k.shape[:-2], k.shape[-1], values.shape[-1], dtype=k.dtype).normalize()

    def value_shift(self, values: Array) -> Array | None:
        return jnp.max(values, axis=-2)

    def factor(self, values: Array, b: Any) -> Array:
        return jnp.exp(values - finite(b)[..., None, :])

    def factor_grad(self, vf: Array, dvf: Array) -> Array:
        return vf * dvf

    def mean(self, sums: Sums, b: Any) -> Array:
        return log_divide(safe_log(sums.s), safe_log(sums.z)[..., None]) + finite(b)[..., None, :]

    def mean_grad(self, sums: Sums, dmean: Array) -> Sums:
        return Sums(safe_divide(dmean, sums.s), safe_divide(-jnp.sum(dmean, axis=-1), sums.z))

    def always_zero_grad(self, dy: Array, b: Any) -> Array | float:
        return jnp.sum(jnp.where((b == NEG_INF)[..., None, :], dy, 0.0), axis=-1)

    def is_exact(self, sums: Sums, b: Any) -> Array:
        can_be_zero = (sums.z == 0)[..., None] | (b == NEG_INF)[..., None, :]
        # Over tokens first: XLA's CPU compiler vectorizes only that.
        return jnp.all(jnp.min(jnp.where(can_be_zero, 1.0, sums.s), axis=-2) >= SMALLEST_SUM, axis=-1)

    def is_value(self, values: Array) -> Array:
        return values < jnp.inf

    def to_state(self, summary: Summary) -> NormalizedState:
        (s, z), shifts = summary
        assert shifts.b is not None
        return NormalizedState.of(safe_log(safe_divide(s, z[..., None])), _log_weight(z, shifts.c), shifts.b)

    def to_summary(self, state: NormalizedState) -> Summary:
        z = jnp.exp(state.h_z.rest)
        return Summary(Sums(jnp.exp(state.log_mean) * z[..., None], z), Shifts(state.h_z.shift, state.b))

    def sum_tokens(self, log_weights: Array, values: Array) -> tuple[Sums, Array | None]:
        # A token's largest weight goes with its value, so that what is forgotten does not raise the shift.
        largest = lax.stop_gradient(jnp.max(log_weights, axis=-1, keepdims=True))
        weights, values = jnp.exp(log_weights - finite(largest)), values + largest
        b = lax.stop_gradient(self.value_shift(values))
        z = einsum("...sk,...s->...k", weights, jnp.exp(largest[..., 0]))
        return Sums(einsum("...sk,...sv->...kv", weights, self.factor(values, b)), z), b


class RealValues(Domain[NormalizedMeanState]):
    """Values of either sign. Their means are divided by their weights, so only those can be too small."""

    zero, can_lose_terms, grad_overwrites_sums = 0.0, False, False

    def empty_state(self, k: Array, values: Array) -> NormalizedMeanState:
        return init_state(k.shape[:-2], k.shape[-1], values.shape[-1], signed=True, dtype=k.dtype).normalize()

    def value_shift(self, values: Array) -> Array | None:
        return None

    def factor(self, values: Array, b: Array | None) -> Array:
        return values

    def factor_grad(self, vf: Array, dvf: Array) -> Array:
        return dvf

    def mean(self, sums: Sums, b: Array | None) -> Array:
        return safe_divide(sums.s, sums.z[..., None])

    def mean_grad(self, sums: Sums, dmean: Array) -> Sums:
        s, z = sums
        ds, dz = safe_divide(dmean, z[..., None]), -jnp.sum(dmean * safe_divide(s, z[..., None]), axis=-1)
        return Sums(ds, safe_divide(dz, z))

    def always_zero_grad(self, dy: Array, b: Array | None) -> Array | float:
        return 0.0

    def is_exact(self, sums: Sums, b: Array | None) -> Array:
        return jnp.ones(sums.s.shape[:-2], bool)

    def is_value(self, values: Array) -> Array:
        return jnp.isfinite(values)

    def to_state(self, summary: Summary) -> NormalizedMeanState:
        (s, z), shifts = summary
        return NormalizedMeanState(safe_divide(s, z[..., None]), _log_weight(z, shifts.c))

    def to_summary(self, state: NormalizedMeanState) -> Summary:
        z = jnp.exp(state.h_z.rest)
        return Summary(Sums(state.mean * z[..., None], z), Shifts(state.h_z.shift, None))

    def sum_tokens(self, log_weights: Array, values: Array) -> tuple[Sums, None]:
        weights = jnp.exp(log_weights)
        s = einsum("...sk,...sv->...kv", weights, values)
        return Sums(s, jnp.sum(weights, axis=-2)), None


LOG_DOMAIN, REAL_DOMAIN = LogValues(), RealValues()


def _log_weight(z: Array, c: Array) -> ShiftedLog:
    """h_z of sums of weights relative to a shift."""
    return ShiftedLog(safe_log(z), jnp.where(z == 0, NEG_INF, c))


# ---- arithmetic at zero ---------------------------------------------------------------------------


@jax.custom_jvp
def safe_divide(a: Array, b: Array) -> Array:
    """a / b, and 0 / 0 = 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


@safe_divide.defjvp
def _safe_divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    ratio = safe_divide(a, b)
    return ratio, safe_divide(da - ratio * db, b)  # JAX's own divides by b * b, which underflows


def safe_log(x: Array) -> Array:
    """log x, with a gradient of 0 at 0."""
    return jnp.where(x == 0, NEG_INF, jnp.log(jnp.where(x == 0, 1.0, x)))
