"""The paper's attention: linear attention with exponential features (`heinsen.log_attention`).

    y[t] = sum_s w[t, s] v[s] / sum_s w[t, s],   w[t, s] = sum_k exp(q[t, k] + k[s, k])     over the visible s

Queries and keys are exponents. With value_domain = log, as in the paper, the layer's values are log v, and the layer
goes on with log y; with value_domain = real they are v, of either sign, and y.

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import dataclasses
from typing import Any, ClassVar, Generic

from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from heinsen.models.mixers.base import Mixer, MixerState, TokenContext, read_fields
from heinsen.ops import running, sharded, states
from heinsen.ops.api import IMPLEMENTATIONS, attend_both_ways, attention, log_attention
from heinsen.ops.arrays import fill_where
from heinsen.ops.running import RunningState
from heinsen.ops.sharded import over_heads
from heinsen.ops.states import LogState, MeanState


@dataclasses.dataclass(frozen=True)
class Heinsen(Mixer[MixerState], Generic[MixerState]):
    """The common part of both value domains.

    `implementation` is an argument of `heinsen.log_attention`. n_features is the number of exponents that a feature map
    makes of queries and keys; None: they are exponents themselves, which rotations would not make relative.
    """

    implementation: str | None
    n_features: int | None

    signed: ClassVar[bool]  # whether values have either sign; else they are given by their logarithms
    takes_exponents: ClassVar[bool] = True
    is_exportable: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: Any) -> Mixer[Any]:
        """Build the mixer of the config's value_domain."""
        if config.value_domain not in VALUE_DOMAINS:
            raise ValueError(f"model.value_domain = {config.value_domain!r}: choose {', '.join(VALUE_DOMAINS)}")
        return read_fields(VALUE_DOMAINS[config.value_domain], config)

    def __post_init__(self) -> None:
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"model.implementation = {self.implementation!r}: choose {sorted(IMPLEMENTATIONS)} or None"
            )

    @property
    def uses_rotary(self) -> bool:
        return self.n_features is not None

    @property
    def takes_log_decay(self) -> bool:
        return True

    def init_state(self, batch_size: int, capacity: int) -> MixerState:
        shape, dtype = (batch_size, self.n_heads), self.accumulator_dtype
        n_features = self.d_key if self.n_features is None else self.n_features
        state: Any = states.init_state(shape, n_features, self.d_value, signed=self.signed, dtype=dtype)
        return state

    def _attend(self, q: Array, k: Array, values: Array, state: Any, context: TokenContext) -> tuple[Array, Any]:
        log_decay, segment_ids = context.log_decay, context.segment_ids
        if context.log_decay_after is not None:  # a model that is not causal, and keeps no state
            assert log_decay is not None
            decays = {"log_decay": log_decay, "log_decay_after": context.log_decay_after}
            return attend_both_ways(q, k, values, **decays, segment_ids=segment_ids, signed=self.signed), None
        function: Any = attention if self.signed else log_attention
        y, after = function(
            q,
            k,
            values,
            log_decay=log_decay,
            causal=self.causal,
            state=state,
            segment_ids=segment_ids,
            implementation=self.implementation,
            return_state=True,
        )
        return y, after


@dataclasses.dataclass(frozen=True)
class LogHeinsen(Heinsen[LogState | RunningState]):
    """log y from log v: the paper's. In a loop of decoding steps the state is a `RunningState`, else a `LogState`."""

    signed: ClassVar[bool] = False

    is_published: ClassVar[bool] = True

    @property
    def splits_sequences(self) -> bool:
        return self.causal

    def attend(
        self,
        q: Float[Array, "B H T K"],
        k: Float[Array, "B H T K"],
        values: Float[Array, "B H T V"],
        state: LogState | RunningState | None,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H T V"], Any]:  # None: a model that sees later tokens keeps no state
        if mesh is not None and mesh.shape["sequence"] > 1 and self.causal:
            assert not isinstance(state, RunningState)
            segment_ids, log_decay = context.segment_ids, context.log_decay
            return sharded.log_attention_on_mesh(mesh, q, k, values, state, segment_ids, self.implementation, log_decay)
        return over_heads(mesh, self._attend)(q, k, values, state, context)

    def step(
        self,
        q: Float[Array, "B H 1 K"],
        k: Float[Array, "B H 1 K"],
        values: Float[Array, "B H 1 V"],
        state: LogState | RunningState,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H 1 V"], LogState | RunningState]:
        if isinstance(state, LogState):
            return self.attend(q, k, values, state, context, mesh)
        log_y, state = running.take_step(state, q[:, :, 0], k[:, :, 0], values[:, :, 0], _decay_of_token(context))
        return log_y[:, :, None], state

    def to_running(self, state: LogState | RunningState) -> RunningState:
        """Steps on running averages: no logarithm of the whole state for every token, and no rounding of it."""
        assert isinstance(state, LogState)
        return running.to_running(state)

    def from_running(self, state: LogState | RunningState) -> tuple[LogState, Bool[Array, "B H"]]:
        """Inexact where an average underflowed beside a larger one."""
        assert isinstance(state, RunningState)
        return running.from_running(state)

    def reset_rows(self, state: LogState | RunningState, rows: Bool[Array, " B"]) -> LogState | RunningState:
        empty = self.init_state(rows.shape[0], 0)
        if isinstance(state, LogState):
            return fill_where(rows, state, empty)
        # What was inexact before the rows forget it stays so.
        return fill_where(rows, state, self.to_running(empty)._replace(smallest=state.smallest))


@dataclasses.dataclass(frozen=True)
class RealHeinsen(Heinsen[MeanState]):
    """y from v, of either sign (`heinsen.attention`)."""

    signed: ClassVar[bool] = True

    def check_use(self, attention: str, is_used: bool) -> None:
        if not is_used:
            raise ValueError(
                f"model.value_domain = 'real' is an option of heinsen attention, of which model.attention = "
                f"{attention!r} has none: set it to log"
            )

    def _step(self, q: Array, k: Array, v: Array, state: MeanState, context: TokenContext) -> tuple[Array, MeanState]:
        """Equations (6) and (5): update the state, then read it."""
        state = states.update_state(state, k[:, :, 0], v[:, :, 0], log_decay=_decay_of_token(context))
        return states.query_state(state, q), state


def _decay_of_token(context: TokenContext) -> Float[Array, "B H"] | None:
    """log_decay of a single token."""
    return None if context.log_decay is None else context.log_decay[:, :, 0]


VALUE_DOMAINS: dict[str, type[Heinsen[Any]]] = {"log": LogHeinsen, "real": RealHeinsen}
