"""Many steps on one state without an exponential of every entry: the form for decoding.

Between `begin_steps` and `end_steps` a state is held as averages of exp(log v), each value column relative to the
largest value seen in it: a step is a multiply-add an entry (eq. (6), normalised), a query one more (eq. (5)). The
tokens of these steps are averaged apart from all before them, and merged with them at the end: after t tokens a single
one changes an average by 1/t, which float32 would round away after some millions, but many together do not vanish so.

An average far below its column's largest value underflows. Steps note the smallest number met, and `end_steps` tells
whether any could have mattered. If so, take the steps again by `update_state` and `query_state` from the first state.

Axes: K key features, V value features; `*batch` is any leading axes, the same in every argument.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from heinsen.attention.recurrent import LogState, MeanState, init_state, merge_states
from heinsen.logspace import NEG_INF, finite, logaddexp, logsumexp, posterior

# Outputs and averages at least this large, relative to their column's largest value, have lost nothing that matters:
# terms below float32's range are 1e-38, and there are at most some hundred of them.
SAFE = 1e-28


class RunningState(NamedTuple):
    """Averages of exp(log v - log_scale) <= 1 before and since `begin_steps`, each with its h_z."""

    before: MeanState  # relative to log_scale_before
    since: MeanState  # relative to log_scale
    log_scale_before: Float[Array, "*batch V"]
    log_scale: Float[Array, "*batch V"]
    smallest: Float[Array, "*batch"]  # of all outputs, relative to their scale


def begin_steps(state: LogState) -> RunningState:
    log_mean = state.h_s - finite(state.h_z)[..., None]
    log_scale = jnp.max(log_mean, axis=-2)
    before = MeanState(posterior(log_mean, log_scale[..., None, :]), state.h_z)
    *batch, d_key, d_value = state.h_s.shape
    since = init_state(tuple(batch), d_key, d_value, signed=True, dtype=state.h_s.dtype)
    return RunningState(before, since, log_scale, log_scale, jnp.ones(batch, state.h_s.dtype))


def step(
    state: RunningState, q: Float[Array, "*batch K"], k: Float[Array, "*batch K"], log_v: Float[Array, "*batch V"]
) -> tuple[Float[Array, "*batch V"], RunningState]:
    """Eqs. (6) and (5): the state after one more token, and log y of its query. Float32 or float64, as the state."""
    log_scale = jnp.maximum(state.log_scale, log_v)
    h_z = logaddexp(state.since.h_z, k)
    rescaled = posterior(state.log_scale, log_scale)[..., None, :] * state.since.mean
    kept, added = posterior(state.since.h_z, h_z), posterior(k, h_z)
    mean = kept[..., None] * rescaled + added[..., None] * posterior(log_v, log_scale)[..., None, :]
    log_weights = q + state.before.h_z, q + h_z
    log_z = logsumexp(jnp.concatenate(log_weights, axis=-1))[..., None]
    # Products of matrices, which XLA's CPU library is ten times as fast at as at a sum of products.
    read = partial(jnp.einsum, "...k,...kv->...v", precision=jax.lax.Precision.HIGHEST)
    y_before, y_since = (
        read(posterior(x, log_z), part.mean)
        for x, part in zip(log_weights, (state.before, MeanState(mean, h_z)), strict=True)
    )
    y = posterior(state.log_scale_before, log_scale) * y_before + y_since
    smallest = jnp.minimum(state.smallest, jnp.min(y, axis=-1))
    return jnp.log(y) + log_scale, RunningState(
        state.before, MeanState(mean, h_z), state.log_scale_before, log_scale, smallest
    )


def end_steps(state: RunningState) -> tuple[LogState, Bool[Array, " *batch"]]:
    """The state after all steps, and whether its averages and every output were exact (NaN, which stays, counts so)."""
    parts = (state.before, state.log_scale_before), (state.since, state.log_scale)
    logs = [
        LogState(jnp.log(part.mean) + log_scale[..., None, :] + part.h_z[..., None], part.h_z)
        for part, log_scale in parts
    ]
    smallest = state.smallest
    for part, _ in parts:
        lowest = jnp.min(jnp.where(part.h_z[..., None] == NEG_INF, 1.0, part.mean), axis=(-2, -1))
        smallest = jnp.minimum(smallest, lowest)
    return merge_states(*logs), ~(smallest < SAFE)
