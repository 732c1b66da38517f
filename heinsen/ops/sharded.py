"""Attention and the position recurrence on a mesh: the batch, the heads and the tokens of every sequence divided.

If the mesh axis `sequence` has n devices, each holds T / n neighboring tokens of every sequence. It computes the state
that its own tokens leave behind, receives the state of all tokens before them by an associative combination along the
axis (`heinsen.parallel.scan_before`), and continues from there as if it were alone. Forward and again backward, each
device sends at most 1 + ceil(log2(n - 1)) states of K (V + 1) numbers per head, independent of the number of tokens.
Its own state costs a device K V multiply-adds per token and head, about a sixth of the forward pass.

Axes: B batch, H heads, T tokens, K key features, V value features, D channels of the recurrence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from heinsen import logspace
from heinsen.ops import chunked
from heinsen.ops.api import log_attention
from heinsen.ops.decay import with_starts
from heinsen.ops.segments import document_starts
from heinsen.ops.states import LogState, init_state, merge_states
from heinsen.parallel import BATCH, MeshError, on_each_device, scan_before

_TOKENS = P(BATCH, "tensor", "sequence", None)  # [B, H, T, ...]
_STATE = P(BATCH, "tensor")
_CHANNELS = P(BATCH, "sequence", None)  # [B, T, D]

Before = TypeVar("Before")
After = TypeVar("After")


def log_attention_on_mesh(
    mesh: Mesh,
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    log_v: Float[Array, "B H T V"],
    state: LogState | None,
    segment_ids: Int[Array, "B 1 T"] | None,
    implementation: str | None,
    log_decay: Float[Array, "B H T"] | None = None,
) -> tuple[Float[Array, "B H T V"], LogState]:
    """Compute causal `heinsen.log_attention`: (log y, the state after all tokens).

    The mesh divides the batch over data x fsdp, heads over tensor, and tokens over sequence. Raises MeshError.
    """

    def on_each(
        q: Array, k: Array, log_v: Array, state: LogState | None, segment_ids: Array | None, log_decay: Array | None
    ) -> tuple[Array, LogState]:
        state = _state_before(k, log_v, state, segment_ids, log_decay)
        given: dict[str, Any] = {"log_decay": log_decay, "segment_ids": segment_ids, "implementation": implementation}
        log_y, end = log_attention(q, k, log_v, state=state, **given, return_state=True)
        return log_y, jax.tree.map(lambda x: x[None], end)

    segments, decays = P(BATCH, None, "sequence"), P(BATCH, "tensor", "sequence")
    log_y, ends = on_each_device(
        mesh,
        on_each,
        in_specs=(_TOKENS, _TOKENS, _TOKENS, _STATE, segments, decays),
        out_specs=(_TOKENS, P("sequence", *_STATE)),
    )(q, k, log_v, state, segment_ids, log_decay)
    return log_y, jax.tree.map(lambda x: x[-1], ends)


def over_heads(
    mesh: Mesh | None, attend: Callable[[Array, Array, Array, Before, Any], tuple[Array, After]]
) -> Callable[[Array, Array, Array, Before, Any], tuple[Array, After]]:
    """Divide the batch and the heads of attend(q, k, v, state, tokens) -> (y, state after) over a mesh.

    Arrays q, k, v and both states are [B, H, ...]. Those of `tokens`, any tree, are [B, ...]; those with H heads are
    divided by heads too. Raises MeshError if the mesh divides sequences too.
    """
    if mesh is None or mesh.size == 1:
        return attend
    if mesh.shape["sequence"] > 1:
        raise MeshError(
            f"mesh.sequence = {mesh.shape['sequence']} divides the tokens of a sequence, but this attention needs whole"
            " sequences: use the mesh's other axes"
        )
    heads = P(BATCH, "tensor")

    def divided(q: Array, k: Array, v: Array, state: Before, context: Any) -> tuple[Array, After]:
        of_context = jax.tree.map(lambda x: heads if x.ndim == 3 and x.shape[1] == q.shape[1] else P(BATCH), context)
        in_specs = heads, heads, heads, heads, of_context
        result: tuple[Array, After] = on_each_device(mesh, attend, in_specs=in_specs, out_specs=(heads, heads))(
            q, k, v, state, context
        )
        return result

    return divided


def _state_before(
    k: Array, log_v: Array, state: LogState | None, segment_ids: Array | None, log_decay: Array | None
) -> LogState:
    """Return the state before this device's first token: an empty one where that token begins a document."""
    is_first = lax.axis_index("sequence") == 0
    empty = init_state(k.shape[:-2], k.shape[-1], log_v.shape[-1], dtype=k.dtype)
    state = empty if state is None else state
    # What the first device leaves behind includes the state before all.
    begin = jax.tree.map(lambda given, none: jnp.where(is_first, given, none), state, empty)
    starts = None
    if segment_ids is not None:
        ids_before = lax.ppermute(segment_ids[..., -1], "sequence", _next_device())
        begins = ~is_first & (ids_before != segment_ids[..., 0])  # [B, 1]
        starts = document_starts(segment_ids).at[..., 0].set(begins)
        starts = jnp.broadcast_to(starts, k.shape[:-1])
    decays = with_starts(log_decay, starts, k)
    # Log of what these tokens leave of the state before them.
    total = jnp.zeros(k.shape[:-2], k.dtype) if decays is None else jnp.sum(decays, axis=-1)
    own = chunked.summarize_tokens(k, log_v, decays, begin)

    Part = tuple[Array, LogState]  # (total, the state after these tokens)

    def combine(earlier: Part, later: Part) -> Part:
        return earlier[0] + later[0], merge_states(earlier[1], later[1], log_decay=later[0])

    before = scan_before(combine, (total, own), (jnp.zeros_like(total), state), "sequence")[1]
    return before if starts is None else before.decay(jnp.where(starts[..., 0], logspace.NEG_INF, 0.0))


def _next_device() -> list[tuple[int, int]]:
    n = lax.axis_size("sequence")
    return [(j, j + 1) for j in range(n - 1)]


def log_linear_recurrence(
    mesh: Mesh | None, log_a: Float[Array, "B T D"], log_b: Float[Array, "B T D"], initial: Float[Array, "B D"]
) -> Float[Array, "B T D"]:
    """e[t] = logaddexp(e[t-1] + log_a[t], log_b[t]) along T from e[-1] = initial (`heinsen.logspace`), on a mesh."""
    run = partial(logspace.log_linear_recurrence, axis=1)
    if mesh is None or mesh.size == 1:
        return run(log_a, log_b, initial=initial)

    def on_each(log_a: Array, log_b: Array, initial: Array) -> Array:
        if mesh.shape["sequence"] > 1:
            begin = jnp.where(lax.axis_index("sequence") == 0, initial, logspace.NEG_INF)
            # These tokens turn the e before them into logaddexp(e + decay, own).
            decay, own = jnp.sum(log_a, axis=1), run(log_a, log_b, initial=begin)[:, -1]

            def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
                return earlier[0] + later[0], logspace.logaddexp(earlier[1] + later[0], later[1])

            _, initial = scan_before(combine, (decay, own), (jnp.zeros_like(decay), initial), "sequence")
        return run(log_a, log_b, initial=initial)

    specs = (_CHANNELS, _CHANNELS, P(BATCH, None))
    return on_each_device(mesh, on_each, in_specs=specs, out_specs=_CHANNELS)(log_a, log_b, initial)
