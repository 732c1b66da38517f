"""Linear attention, normalized, with a state of constant size.

    y[t] = sum_s (f(q[t]) . f(k[s])) v[s] / sum_s f(q[t]) . f(k[s]),   f = elu + 1     over the visible s

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import dataclasses

from jaxtyping import Array

from heinsen.models.mixers.base import Mixer, TokenContext
from heinsen.ops.linear import LinearState, init_linear_state, linear_attention


@dataclasses.dataclass(frozen=True)
class Linear(Mixer[LinearState]):
    """Linear attention (`heinsen.linear_attention`)."""

    @property
    def takes_log_decay(self) -> bool:
        return self.causal

    def init_state(self, batch_size: int, capacity: int) -> LinearState:
        return init_linear_state((batch_size, self.n_heads), self.d_key, self.d_value, dtype=self.accumulator_dtype)

    def _attend(
        self, q: Array, k: Array, v: Array, state: LinearState | None, context: TokenContext
    ) -> tuple[Array, LinearState]:
        return linear_attention(
            q,
            k,
            v,
            log_decay=context.log_decay,
            causal=self.causal,
            state=state,
            segment_ids=context.segment_ids,
            return_state=True,
        )
