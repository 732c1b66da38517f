"""Many decoding steps on one state of log values, without an exponential per entry. Equations (5) and (6) of the paper.

Axes: K key features, V value features; `*batch` is any leading axes, the same in every argument.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from heinsen.logspace import NEG_INF, finite, logaddexp, logsumexp, posterior
from heinsen.ops.states import LogState, MeanState, init_state

# Outputs and means at least this large, relative to their column's largest value, have lost nothing that matters:
# terms below float32's range are 1e-38, and there are at most some hundred of them.
SMALLEST_SAFE_MEAN = 1e-28


class RunningState(NamedTuple):
    """A `LogState` during many decoding steps, held so that a step needs no exponential per entry.

    Values are kept as means of exp(log v - log_scale) <= 1: a step is one multiply-add per entry (eq. (6), normalized),
    a query one more (eq. (5)). The tokens since `to_running` are averaged separately from those before, and merged
    with them by `from_running`: after t tokens a single one changes a mean by 1/t, which float32 would round away after
    some millions, but the mean of many does not vanish so.

    A mean far below its column's largest value underflows. Steps record the smallest output, from which `from_running`
    tells whether any mean could have lost terms; if so, repeat the steps by `update_state` and `query_state`.
    """

    before: MeanState  # relative to log_scale_before
    since: MeanState  # relative to log_scale
    log_scale_before: Float[Array, "*batch V"]
    log_scale: Float[Array, "*batch V"]
    log_decay: Float[Array, "*batch"]  # of `before`, since `to_running`: its h_z would round many small ones away
    smallest: Float[Array, "*batch"]  # of all outputs, relative to their scale


def to_running(state: LogState) -> RunningState:
    """A state to be updated by `take_step`."""
    log_mean = state.h_s - finite(state.h_z)[..., None]
    log_scale = jnp.max(log_mean, axis=-2)
    before = MeanState(posterior(log_mean, log_scale[..., None, :]), state.h_z)
    *batch, d_key, d_value = state.h_s.shape
    since = init_state(tuple(batch), d_key, d_value, signed=True, dtype=state.h_s.dtype)
    none, one = jnp.zeros(batch, state.h_s.dtype), jnp.ones(batch, state.h_s.dtype)
    return RunningState(before, since, log_scale, log_scale, log_decay=none, smallest=one)


def take_step(
    state: RunningState,
    q: Float[Array, "*batch K"],
    k: Float[Array, "*batch K"],
    log_v: Float[Array, "*batch V"],
    log_decay: Float[Array, "*batch"] | None = None,
) -> tuple[Float[Array, "*batch V"], RunningState]:
    """Eqs. (6) and (5): log y of a token's query, and the state after that token, in the state's dtype.

    log_decay: as in `update_state`.
    """
    log_scale = jnp.maximum(state.log_scale, log_v)
    since_h_z, decay_before = state.since.h_z, state.log_decay
    if log_decay is not None:
        since_h_z, decay_before = since_h_z + log_decay[..., None], decay_before + log_decay
    h_z = logaddexp(since_h_z, k)
    rescaled = posterior(state.log_scale, log_scale)[..., None, :] * state.since.mean
    share, weight = posterior(since_h_z, h_z), posterior(k, h_z)
    mean = share[..., None] * rescaled + weight[..., None] * posterior(log_v, log_scale)[..., None, :]
    log_weights = q + (state.before.h_z + decay_before[..., None]), q + h_z
    log_z = logsumexp(jnp.concatenate(log_weights, axis=-1))[..., None]
    # Matrix products: XLA's CPU library takes a tenth of the time that a sum of elementwise products takes.
    product = partial(jnp.einsum, "...k,...kv->...v", precision=lax.Precision.HIGHEST)
    y_before, y_since = (
        product(posterior(x, log_z), part.mean)
        for x, part in zip(log_weights, (state.before, MeanState(mean, h_z)), strict=True)
    )
    y = posterior(state.log_scale_before, log_scale) * y_before + y_since
    smallest = jnp.minimum(state.smallest, jnp.min(y, axis=-1))
    return jnp.log(y) + log_scale, state._replace(
        since=MeanState(mean, h_z), log_scale=log_scale, log_decay=decay_before, smallest=smallest
    )


def from_running(state: RunningState) -> tuple[LogState, Bool[Array, "*batch"]]:
    """The state after all steps, and whether its means and every output were exact (NaN, which stays, counts as so)."""
    decayed = state.before.decay(state.log_decay)
    parts = (decayed, state.log_scale_before), (state.since, state.log_scale)
    before, since = (
        LogState(jnp.log(part.mean) + log_scale[..., None, :] + part.h_z[..., None], part.h_z)
        for part, log_scale in parts
    )
    smallest = state.smallest
    for part, _ in parts:
        lowest = jnp.min(jnp.where(part.h_z[..., None] == NEG_INF, 1.0, part.mean), axis=(-2, -1))
        smallest = jnp.minimum(smallest, lowest)
    return before.merge(since), ~(smallest < SMALLEST_SAFE_MEAN)
