"""The gated delta rule, as in Gated DeltaNet (Yang, Kautz & Hatamizadeh, 2024), with a state of constant size.

    S[t] = exp(log_decay[t]) (I - beta[t] k[t] k[t]^T) S[t-1] + beta[t] k[t] v[t]^T,   y[t] = RMSNorm(S[t]^T q[t])

q, k and v pass a SiLU; then q and k are divided by their norms, and q by sqrt(K). beta is how much a token writes.

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from heinsen.models.mixers.base import Mixer, TokenContext
from heinsen.ops.delta import DeltaState, delta_rule, init_delta_state

_NORM_EPSILON = 1e-6  # added to the sum of squares of a query or a key
_RMS_EPSILON = 1e-5  # added to the mean of squares of an output, as in layer norms


@dataclasses.dataclass(frozen=True)
class Delta(Mixer[DeltaState]):
    """The gated delta rule (`heinsen.ops.delta`), for causal models."""

    takes_beta: ClassVar[bool] = True

    def check_use(self, attention: str, is_used: bool) -> None:
        if is_used and not self.causal:
            raise ValueError(
                f"model.objective = 'masked': model.attention = {attention!r} has delta layers, which read tokens in "
                "their order only; set model.objective to next_token, or choose another kind of attention"
            )

    @property
    def takes_log_decay(self) -> bool:
        return self.causal

    def init_state(self, batch_size: int, capacity: int) -> DeltaState:
        return init_delta_state((batch_size, self.n_heads), self.d_key, self.d_value, dtype=self.accumulator_dtype)

    def _attend(
        self, q: Array, k: Array, v: Array, state: DeltaState | None, context: TokenContext
    ) -> tuple[Array, DeltaState]:
        assert context.beta is not None
        q, k, v = map(jax.nn.silu, (q, k, v))
        y, after = delta_rule(
            _normalize(q) / math.sqrt(self.d_key),
            _normalize(k),
            v,
            context.beta,
            log_decay=context.log_decay,
            state=state,
            segment_ids=context.segment_ids,
        )
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + _RMS_EPSILON), after


def _normalize(x: Array) -> Array:
    """x divided by its norm."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _NORM_EPSILON)
