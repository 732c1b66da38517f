"""Softmax attention, with a key-value cache.

    y[t] = sum_s softmax_s(q[t] . k[s] / sqrt(K) + sum_{s < u <= t} log_decay[u]) v[s]     over the visible s

Axes: B batch, H heads, T tokens, K features of keys and values alike.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen import backend
from heinsen.models.mixers.base import TokenContext
from heinsen.models.mixers.cached import CachedMixer
from heinsen.ops import softmax
from heinsen.ops.softmax import KVCache


@dataclasses.dataclass(frozen=True)
class Softmax(CachedMixer):
    """Softmax attention (`heinsen.ops.softmax`). Keys and values have the same number of features."""

    forget_gate: str

    can_teach: ClassVar[bool] = True

    def check_use(self, attention: str, is_used: bool) -> None:
        if is_used and self.d_key != self.d_value:
            raise ValueError(
                f"softmax attention needs model.d_key = {self.d_key} and model.d_value = {self.d_value} to be equal"
            )

    @property
    def takes_log_decay(self) -> bool:
        return self.causal

    def performance_note(self) -> str | None:
        has_gate = self.forget_gate != "none"
        if backend.current() != "gpu" or softmax.is_fused(self.dtype, self.d_key, has_gate):
            return None
        of_heads = "model.d_key and d_value a multiple of 8, at most 128"
        remedy = (
            "model.forget_gate=none" if has_gate else of_heads if self.dtype == "bfloat16" else "model.dtype=bfloat16"
        )
        return f"softmax attention writes all T x T scores: cuDNN takes part with {remedy}, compare with that"

    def init_state(self, batch_size: int, capacity: int) -> KVCache:
        cache = super().init_state(batch_size, capacity)
        if self.forget_gate == "none" or not self.takes_log_decay:
            return cache
        return cache._replace(decayed=jnp.zeros((*cache.k.shape[:-1], 1), self.accumulator_dtype))

    def attend_whole(
        self, q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], v: Float[Array, "B H T K"], context: TokenContext
    ) -> Float[Array, "B H T K"]:
        return softmax.softmax_attention(q, k, v, context.segment_ids, self.causal, context.log_decay)

    def attend_cache(
        self, q: Float[Array, "B H T K"], cache: KVCache, context: TokenContext
    ) -> Float[Array, "B H T K"]:
        return softmax.attend_cached(q, cache, context.slot, context.document_start)

    def _step(self, q: Array, k: Array, v: Array, state: KVCache, context: TokenContext) -> tuple[Array, KVCache]:
        """Without a copy of the cache, where all rows have one more token."""
        if context.valid is not None:
            return self._attend(q, k, v, state, context)
        q, token = self._prepare(q, k, v, state, context)
        return softmax.step_cached(q, token, state, context.slot, context.document_start)
