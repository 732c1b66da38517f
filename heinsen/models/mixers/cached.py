"""Mixers with a key-value cache: a state that grows with the tokens.

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import abc
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Bool, Float

from heinsen.models.mixers.base import Mixer, TokenContext
from heinsen.ops import softmax
from heinsen.ops.softmax import KVCache


@dataclasses.dataclass(frozen=True)
class CachedMixer(Mixer[KVCache], abc.ABC):
    """A mixer whose state is the keys and values of all tokens, in slots. Its products have inputs of `dtype`."""

    has_cache: ClassVar[bool] = True

    @property
    def uses_rotary(self) -> bool:
        return True

    def init_state(self, batch_size: int, capacity: int) -> KVCache:
        return softmax.init_cache(batch_size, self.n_heads, capacity, self.d_key, self.d_value, self.dtype)

    def _attend(
        self, q: Array, k: Array, v: Array, state: KVCache | None, context: TokenContext
    ) -> tuple[Array, KVCache]:
        q, tokens = self._prepare(q, k, v, state, context)
        if state is None:
            return self.attend_whole(q, tokens.k, tokens.v, context), tokens
        cache = softmax.append(state, tokens, context.slot, context.valid)
        return self.attend_cache(q, cache, context), cache

    def _prepare(
        self, q: Array, k: Array, v: Array, state: KVCache | None, context: TokenContext
    ) -> tuple[Array, KVCache]:
        """Queries, and what the cache keeps of tokens."""
        log_decay = context.log_decay
        decayed = None if log_decay is None else softmax.sum_decays(state, log_decay, context.slot)
        return q.astype(self.dtype), KVCache(k.astype(self.dtype), v.astype(self.dtype), decayed)

    @abc.abstractmethod
    def attend_whole(
        self, q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], v: Float[Array, "B H T V"], context: TokenContext
    ) -> Float[Array, "B H T V"]:
        """Return the attention of tokens with nothing before them."""

    @abc.abstractmethod
    def attend_cache(
        self, q: Float[Array, "B H T K"], cache: KVCache, context: TokenContext
    ) -> Float[Array, "B H T V"]:
        """Return what queries read from a cache that holds their own tokens already."""

    def reset_rows(self, state: KVCache, rows: Bool[Array, " B"]) -> KVCache:
        """The cache as it is: `TokenContext.document_start` says what is seen, and its slots are free again."""
        return state
