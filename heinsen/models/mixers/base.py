"""The mixer interface: everything in which one kind of attention differs from another.

A mixer is the attention of a layer. The layer hands it queries, keys and values of all heads; the mixer returns one
output per token, and its state: what it remembers of the tokens so far. `heinsen.models.mixers` lists the kinds.

A mixer is a frozen dataclass, and its fields are the fields of `heinsen.models.ModelConfig` that it reads.

Axes: B batch, H heads, T tokens, K key features, V value features.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.logspace import NEG_INF
from heinsen.ops.arrays import fill_where
from heinsen.ops.sharded import over_heads

MixerState = TypeVar("MixerState")
AnyMixer = TypeVar("AnyMixer", bound="Mixer[Any]")


class TokenContext(NamedTuple):
    """Facts about each token that layers need besides its features: cache slot, document, padding, gates."""

    slot: Int[Array, "B T"]  # number of tokens before each, since the state was empty
    document_start: Int[Array, "B T"]  # slot of the first token that each one sees
    valid: Bool[Array, "B T"] | None  # false for padding at a row's end; None: there is no padding
    segment_ids: Int[Array, "B 1 T"] | None  # tokens see each other within a run of equal ids; None: one document
    begins: Bool[Array, "B T"] | None = None  # whether each begins a document; None: none can
    log_decay: Float[Array, "B H T"] | None = None  # a forget gate (`heinsen.log_attention`), for mixers that take one
    log_decay_after: Float[Array, "B H T"] | None = None  # the gate by which later tokens decay; None if causal
    beta: Float[Array, "B H T"] | None = None  # from 0 to 1, how much a token writes, for mixers that take it

    @property
    def place(self) -> Int[Array, "B T"]:
        """Place of each token in its document, from 0."""
        return self.slot - self.document_start


@dataclasses.dataclass(frozen=True)
class Mixer(abc.ABC, Generic[MixerState]):
    """One kind of attention. A state is a tree of arrays with leading axes [B, H].

    Subclasses must define `init_state` and `_attend`; the other methods have defaults for a state of constant size.
    """

    n_heads: int
    d_key: int
    d_value: int
    dtype: str
    causal: bool

    # Whether the state is a cache: arrays [B, H, slots, ...] with a slot for every token (`TokenContext.slot`).
    has_cache: ClassVar[bool] = False
    # Whether queries and keys are exponents: they stay float32, and pass a feature map where the model has one.
    takes_exponents: ClassVar[bool] = False
    # Whether tokens write with `TokenContext.beta`. A beta of 0 then hides padding, else keys do.
    takes_beta: ClassVar[bool] = False
    # Whether exports for other libraries have it: transformers (`heinsen.export.huggingface`) and ONNX.
    is_exportable: ClassVar[bool] = False
    # Whether attention of constant cost can be taught by it (`heinsen.training.conversion`).
    can_teach: ClassVar[bool] = False
    # Whether the published module has this attention.
    is_published: ClassVar[bool] = False

    # ---- configuration ----

    @classmethod
    def from_config(cls, config: Any) -> "Mixer[Any]":
        """Build the mixer from `config`, a `ModelConfig`. Raises ValueError for impossible values."""
        return read_fields(cls, config)

    def check_use(self, attention: str, is_used: bool) -> None:
        """Raise ValueError where the fields do not fit a model with layers of this kind, or one without them.

        `attention` is the model's pattern, for the message.
        """

    @property
    def uses_rotary(self) -> bool:
        """Whether queries and keys are rotated where the model has rotary positions."""
        return False

    @property
    def takes_log_decay(self) -> bool:
        """Whether it forgets by `TokenContext.log_decay`, and by `log_decay_after` if it is not causal.

        Such mixers give a key of -inf no weight, by which the layer hides padding, unless they take a beta or have
        a cache, which leaves padding out.
        """
        return False

    @property
    def splits_sequences(self) -> bool:
        """Whether a mesh may divide the tokens of a sequence."""
        return False

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """dtype of sums over tokens: at least float32."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def performance_note(self) -> str | None:
        """What slows it on the backend that is compiled for, and what to compare it with; None if nothing does."""
        return None

    # ---- attention ----

    @abc.abstractmethod
    def init_state(self, batch_size: int, capacity: int) -> MixerState:
        """Return the state before any token. A cache has room for `capacity` tokens."""

    def attend(
        self,
        q: Float[Array, "B H T K"],
        k: Float[Array, "B H T K"],
        values: Float[Array, "B H T V"],
        state: MixerState | None,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H T V"], MixerState]:
        """Attend with T tokens at once, to train and to read prompts: (output, state after them).

        `state` is what came before (None: nothing). On a mesh the batch and the heads are divided, and tokens too if
        `splits_sequences`.
        """
        return over_heads(mesh, self._attend)(q, k, values, state, context)

    @abc.abstractmethod
    def _attend(
        self, q: Array, k: Array, v: Array, state: MixerState | None, context: TokenContext
    ) -> tuple[Array, MixerState]:
        """Compute `attend` on one device, for its share of the batch and of the heads."""

    def step(
        self,
        q: Float[Array, "B H 1 K"],
        k: Float[Array, "B H 1 K"],
        values: Float[Array, "B H 1 V"],
        state: MixerState,
        context: TokenContext,
        mesh: Mesh | None,
    ) -> tuple[Float[Array, "B H 1 V"], MixerState]:
        """Attend with one more token: (output, state after it)."""
        return over_heads(mesh, self._step)(q, k, values, state, context)

    def _step(self, q: Array, k: Array, v: Array, state: MixerState, context: TokenContext) -> tuple[Array, MixerState]:
        """Compute `step` on one device, for its share of the batch and of the heads."""
        return self._attend(q, k, v, state, context)

    # ---- decoding ----

    def to_running(self, state: MixerState) -> MixerState:
        """Convert a state to the form in which `step` is fastest and most exact."""
        return state

    def from_running(self, state: MixerState) -> tuple[MixerState, Bool[Array, "..."]]:
        """Convert a state back from `to_running`: (state, whether all steps since were exact).

        Where they were not, they must be repeated from the state before, without `to_running`.
        """
        return state, jnp.ones((), bool)

    def reset_rows(self, state: MixerState, rows: Bool[Array, " B"]) -> MixerState:
        """Return the state with those rows as before any token."""
        return fill_where(rows, state, self.init_state(rows.shape[0], 0))


def hide_padding(k: Float[Array, "B H T K"], context: TokenContext) -> tuple[Float[Array, "B H T K"], TokenContext]:
    """Keys without weight and log decays of 0 where a row has padding, so that a causal state passes over it."""
    valid = context.valid
    if valid is None:
        return k, context
    if context.log_decay is not None:
        context = context._replace(log_decay=jnp.where(valid[:, None], context.log_decay, 0.0))
    if context.beta is not None:
        return k, context._replace(beta=jnp.where(valid[:, None], context.beta, 0.0))
    return jnp.where(valid[:, None, :, None], k, NEG_INF), context


def read_fields(mixer: type[AnyMixer], config: Any) -> AnyMixer:
    """Build a mixer of this class from the attributes of `config` that have its fields' names."""
    return mixer(**{field.name: getattr(config, field.name) for field in dataclasses.fields(mixer)})
