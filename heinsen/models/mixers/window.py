"""Softmax attention to the last tokens, with a state of constant size.

    y[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K)) v[s]     over the visible s with t - W < s <= t

A masked model sees as many tokens after t as before it.

Axes: B batch, H heads, T tokens, K key features, V value features, W window.
"""

import dataclasses
from typing import ClassVar

from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from heinsen.models.mixers.base import Mixer, TokenContext
from heinsen.ops import window
from heinsen.ops.sharded import over_heads
from heinsen.ops.softmax import KVCache


@dataclasses.dataclass(frozen=True)
class Window(Mixer[KVCache]):
    """Softmax attention to the last `window` tokens (`heinsen.ops.window`). Its products have inputs of `dtype`."""

    window: int | None

    uses_rotary: ClassVar[bool] = True

    def check_use(self, attention: str, is_used: bool) -> None:
        if is_used and self.window is None:
            raise ValueError(
                f"model.window = None: model.attention = {attention!r} needs the number of tokens that each one sees "
                "in window layers, such as 256"
            )

    @property
    def size(self) -> int:
        """Number of tokens that each one sees."""
        assert self.window is not None
        return self.window

    def init_state(self, batch_size: int, capacity: int) -> KVCache:
        return window.init_ring(batch_size, self.n_heads, self.size, self.d_key, self.d_value, self.dtype)

    def parallel(
        self,
        q: Float[Array, "B H T K"],
        k: Float[Array, "B H T K"],
        values: Float[Array, "B H T V"],
        state: KVCache | None,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H T V"], KVCache]:
        return over_heads(mesh, self._attend)(q, k, values, state, context)

    def _attend(
        self, q: Array, k: Array, v: Array, state: KVCache | None, context: TokenContext
    ) -> tuple[Array, KVCache]:
        q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        if self.causal:
            y = window.window_attention(q, k, v, self.size, state, context.slot, context.first)
        else:
            y = window.window_attention_both_ways(q, k, v, self.size, context.segment_ids)
        if state is None:
            state = window.init_ring(q.shape[0], q.shape[1], self.size, self.d_key, self.d_value, self.dtype)
        return y, window.append_ring(state, k, v, context.slot, context.valid)

    def step(
        self,
        q: Float[Array, "B H 1 K"],
        k: Float[Array, "B H 1 K"],
        values: Float[Array, "B H 1 V"],
        state: KVCache,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H 1 V"], KVCache]:
        """Mix one more token without a copy of the ring, where all rows have one."""
        if context.valid is not None:
            return self.parallel(q, k, values, state, context, mesh)
        return over_heads(mesh, self._step)(q, k, values, state, context)

    def _step(self, q: Array, k: Array, v: Array, state: KVCache, context: TokenContext) -> tuple[Array, KVCache]:
        q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        return window.step_window(q, k, v, state, context.slot, context.first)

    def forget(self, state: KVCache, rows: Bool[Array, " B"]) -> KVCache:
        """The ring as it is: `TokenContext.first` says what is seen."""
        return state
