"""The attention and the position recurrence over a mesh: batch and heads split, and the tokens of every sequence too.

Where the axis `sequence` of the mesh has n devices, each holds T / n neighbouring tokens of every sequence. It makes
the state that its own tokens leave behind, receives that of all tokens before them by an associative combination along
the axis (`heinsen.parallel.scan_before`), and goes on from there as if it were alone. Forward, and again backward, a
device sends at most 1 + ceil(log2(n - 1)) states of K (V + 1) numbers a head, whatever the number of tokens. Making its
own state costs it K V multiply-adds a token and head more, about a sixth of the forward pass.

Axes: B batch, H heads, T tokens, K key and V value features, D channels of the recurrence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from heinsen import logspace
from heinsen.ops import chunked
from heinsen.ops.api import log_attention as on_one_device
from heinsen.ops.states import LogState, init_state, merge_states
from heinsen.parallel import BATCH, MeshError, on_each_device, scan_before

_TOKENS = P(BATCH, "tensor", "sequence", None)  # [B, H, T, ...]
_STATE = P(BATCH, "tensor")
_CHANNELS = P(BATCH, "sequence", None)  # [B, T, D]


def log_attention(
    mesh: Mesh | None,
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    log_v: Float[Array, "B H T V"],
    state: LogState | None,
    segment_ids: Int[Array, "B 1 T"] | None,
    implementation: str | None,
    causal: bool = True,
) -> tuple[Float[Array, "B H T V"], LogState]:
    """`heinsen.log_attention`, and the state after all tokens.

    The batch divides over the mesh's data x fsdp, heads over tensor, tokens over sequence if causal. Raises MeshError.
    """
    attend = partial(on_one_device, implementation=implementation, causal=causal, return_state=True)
    if mesh is None or mesh.size == 1:
        return attend(q, k, log_v, state=state, segment_ids=segment_ids)
    if not causal:
        whole = lambda q, k, log_v, state, segment_ids: attend(q, k, log_v, state=state, segment_ids=segment_ids)
        return over_heads(mesh, whole)(q, k, log_v, state, segment_ids)

    def on_each(q, k, log_v, state, segment_ids):
        if mesh.shape["sequence"] > 1:
            state, segment_ids = _state_before(k, log_v, state, segment_ids)
        log_y, end = attend(q, k, log_v, state=state, segment_ids=segment_ids)
        return log_y, jax.tree.map(lambda x: x[None], end)

    segments = P(BATCH, None, "sequence")
    log_y, ends = on_each_device(
        mesh,
        on_each,
        in_specs=(_TOKENS, _TOKENS, _TOKENS, _STATE, segments),
        out_specs=(_TOKENS, P("sequence", *_STATE)),
    )(q, k, log_v, state, segment_ids)
    return log_y, jax.tree.map(lambda x: x[-1], ends)


def over_heads(mesh: Mesh | None, attend: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
    """attend(q, k, v, state, tokens) -> (y, state after) of whole sequences, with the batch and the heads divided.

    q, k, v and the arrays of both states are [B, H, ...], those of `tokens`, any tree, [B, ...]. Raises MeshError.
    """
    if mesh is None or mesh.size == 1:
        return attend
    if mesh.shape["sequence"] > 1:
        raise MeshError(
            f"mesh.sequence = {mesh.shape['sequence']}: only the causal attention of log values (model.attention = "
            "heinsen, model.value_domain = log) divides a sequence's tokens"
        )
    heads = P(BATCH, "tensor")
    return on_each_device(mesh, attend, in_specs=(heads, heads, heads, heads, P(BATCH)), out_specs=(heads, heads))


def _state_before(k, log_v, state, segment_ids):
    """The state before this device's first token; and segment_ids if that continues a document, else new ones.

    A document that begins with a device's first token is no run of equal ids that the device could see begin.
    """
    is_first = lax.axis_index("sequence") == 0
    empty = init_state(k.shape[:-2], k.shape[-1], log_v.shape[-1], dtype=k.dtype)
    state = empty if state is None else state
    # What the first device leaves behind includes the state before all.
    begin = jax.tree.map(lambda given, none: jnp.where(is_first, given, none), state, empty)
    forgets, resets = jnp.zeros((), bool), None
    if segment_ids is not None:
        ids_before = lax.ppermute(segment_ids[..., -1], "sequence", _next_device())
        begins = ~is_first & (ids_before != segment_ids[..., 0])  # [B, 1]
        changes = segment_ids[..., 1:] != segment_ids[..., :-1]
        resets = jnp.concatenate([begins[..., None], changes], axis=-1)
        forgets = jnp.any(resets, axis=-1)
        resets = jnp.broadcast_to(resets, k.shape[:-1])
    own = chunked.state_after(k, log_v, begin, resets)

    def combine(earlier, later):
        """Of (whether a document begins, the state after all)."""
        cleared = _cleared(earlier[1], later[0])
        return earlier[0] | later[0], merge_states(cleared, later[1])

    before = scan_before(combine, (forgets, own), (jnp.zeros_like(forgets), state), "sequence")[1]
    return before if segment_ids is None else _cleared(before, begins), segment_ids


def _cleared(state: LogState, where: Bool[Array, "B 1"] | Bool[Array, ""]) -> LogState:
    """The state of no tokens in those rows."""
    rows = lambda x: where.reshape(where.shape + (1,) * (x.ndim - where.ndim))
    return jax.tree.map(lambda x: jnp.where(rows(x), logspace.NEG_INF, x), state)


def _next_device():
    n = lax.axis_size("sequence")
    return [(j, j + 1) for j in range(n - 1)]


def log_linear_recurrence(
    mesh: Mesh | None, log_a: Float[Array, "B T D"], log_b: Float[Array, "B T D"], initial: Float[Array, "B D"]
) -> Float[Array, "B T D"]:
    """e[t] = logaddexp(e[t-1] + log_a[t], log_b[t]) along T from e[-1] = initial: `heinsen.logspace`."""
    run = partial(logspace.log_linear_recurrence, axis=1)
    if mesh is None or mesh.size == 1:
        return run(log_a, log_b, initial=initial)

    def on_each(log_a, log_b, initial):
        if mesh.shape["sequence"] > 1:
            begin = jnp.where(lax.axis_index("sequence") == 0, initial, logspace.NEG_INF)
            # What these tokens make of e before them: logaddexp(e + decay, own).
            decay, own = jnp.sum(log_a, axis=1), run(log_a, log_b, initial=begin)[:, -1]

            def combine(earlier, later):
                return earlier[0] + later[0], logspace.logaddexp(earlier[1] + later[0], later[1])

            _, initial = scan_before(combine, (decay, own), (jnp.zeros_like(decay), initial), "sequence")
        return run(log_a, log_b, initial=initial)

    specs = (_CHANNELS, _CHANNELS, P(BATCH, None))
    return on_each_device(mesh, on_each, in_specs=specs, out_specs=_CHANNELS)(log_a, log_b, initial)
