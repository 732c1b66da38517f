"""Sigmoid attention, with a key-value cache.

    y[t] = n[t]^-alpha sum_s sigmoid(q[t] . k[s] / sqrt(K) + bias) v[s]     over the n[t] visible s

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import dataclasses
import math
from typing import Literal

from jaxtyping import Array, Float

from heinsen.models.mixers.base import TokenContext
from heinsen.models.mixers.cached import CachedMixer
from heinsen.ops.sigmoid import sigmoid_attention, sigmoid_attention_cached
from heinsen.ops.softmax import KVCache


@dataclasses.dataclass(frozen=True)
class Sigmoid(CachedMixer):
    """Sigmoid attention (`heinsen.sigmoid_attention`), with alpha and bias from the config."""

    sigmoid_alpha: float
    sigmoid_bias: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.sigmoid_alpha):
            raise ValueError(f"model.sigmoid_alpha = {self.sigmoid_alpha}: it must be finite")
        try:
            is_finite = self.bias == "-log_n" or math.isfinite(self.bias)
        except ValueError:
            is_finite = False
        if not is_finite:
            raise ValueError(f"model.sigmoid_bias = {self.sigmoid_bias!r}: expected a finite number, or -log_n")

    @property
    def bias(self) -> float | Literal["-log_n"]:
        """The number that sigmoid_bias names, or "-log_n" for -log n[t]."""
        return "-log_n" if self.sigmoid_bias == "-log_n" else float(self.sigmoid_bias)

    def attend_whole(
        self, q: Float[Array, "B H T K"], k: Float[Array, "B H T K"], v: Float[Array, "B H T V"], context: TokenContext
    ) -> Float[Array, "B H T V"]:
        return sigmoid_attention(
            q,
            k,
            v,
            causal=self.causal,
            alpha=self.sigmoid_alpha,
            bias=self.bias,
            segment_ids=context.segment_ids,
        )

    def attend_cache(
        self, q: Float[Array, "B H T K"], cache: KVCache, context: TokenContext
    ) -> Float[Array, "B H T V"]:
        return sigmoid_attention_cached(
            q,
            cache.k,
            cache.v,
            context.slot[:, -1:] + 1,
            offset=context.slot[:, :1],
            first=context.document_start[:, None],
            alpha=self.sigmoid_alpha,
            bias=self.bias,
        )
