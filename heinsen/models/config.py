"""The configuration of a language model, with its checks."""

import dataclasses
import math
import re
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from heinsen.config import Limits, added, check_numbers
from heinsen.errors import InputError
from heinsen.models.dense import PRODUCT
from heinsen.models.feature_map import LOG_FEATURES
from heinsen.models.mixers import MIXERS, Mixer
from heinsen.ops.arrays import ATTENTION

# What each layer saves for the backward pass, which recomputes the rest, by the name of what is recomputed.
REMAT_POLICIES = {
    "none": None,  # everything
    "full": None,  # its input
    # Also the products with its matrices, and the attention's output: what is elementwise is computed again.
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION),
}

_SIZE = Limits(at_least=1, below=2**28)  # of an axis of an array

BLOCKS = ("heinsen", "gpt2")  # classes in heinsen.models.language_model
POSITIONS = ("recurrent", "learned", "rotary", "none")  # classes in heinsen.models.positions
GATES = ("none", "head")  # heinsen.models.gate
OBJECTIVES = ("next_token", "masked")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a language model; `configs/default.py` has the paper's.

    Attributes:
      vocab_size: number of the tokenizer's ids. The embedding and the softmax have padded_vocab_size rows.
      attention: the kind of attention of all layers (`heinsen.models.mixers.MIXERS`), or a pattern that repeats, such
        as heinsen*3,softmax.
      sigmoid_alpha, sigmoid_bias: arguments of `heinsen.sigmoid_attention`, for sigmoid layers.
      value_domain: for heinsen layers, "log" for `heinsen.log_attention` or "real" for `heinsen.attention`.
      convolution: taps of a short causal convolution of queries, keys and values (`heinsen.models.convolution`), from 2
        on; 0: none.
      forget_gate: for layers of all kinds but sigmoid (`heinsen.models.gate`), "head": one number per head and
        token; in a masked model one for each direction, for heinsen layers alone, in the chunked implementation.
      forget_gate_shortest, forget_gate_longest: the time constants of its heads at the start, in tokens, are spread
        between these.
      output_gate: whether the attention's output is multiplied by a gate (`heinsen.models.language_model.Layer`).
      block: what surrounds the attention in a layer, "heinsen" for the paper's or "gpt2".
      position: how the model knows the order of tokens (`heinsen.models.positions`).
      n_positions: number of learned positions.
      objective: "next_token", or "masked" for a bidirectional model.
      dtype: dtype of matrix products and what follows them: docs/training.md#precision.
      remat: what the backward pass recomputes, a key of REMAT_POLICIES.
      implementation: the argument of `heinsen.log_attention`, for heinsen layers (None: the fastest).
      document_token: the id that begins a document. There the model forgets everything before it (None: never).
      feature_map: for heinsen layers, "none", or the features that learned maps make of queries and keys
        (`heinsen.models.feature_map`). With one, rotary positions rotate these layers' queries and keys, too.
      d_features: number of these features of a head, even (None: 2 d_key).

    Raises ValueError for values that are impossible or do not fit each other.
    """

    vocab_size: Annotated[int, _SIZE]
    padded_vocab_size: Annotated[int, _SIZE]
    n_layers: Annotated[int, Limits(at_least=1, below=10_000)]
    d_model: Annotated[int, _SIZE]
    n_heads: Annotated[int, _SIZE]
    d_key: Annotated[int, _SIZE]
    d_value: Annotated[int, _SIZE]
    attention: str
    sigmoid_alpha: Annotated[float, Limits(at_least=-math.inf)]
    sigmoid_bias: str
    value_domain: str
    convolution: Annotated[int, Limits(at_least=0, below=65)]
    forget_gate: str
    forget_gate_shortest: float
    forget_gate_longest: float
    output_gate: bool
    block: str
    position: str
    n_positions: Annotated[int | None, _SIZE]
    objective: str
    dtype: str
    remat: str
    implementation: str | None
    document_token: Annotated[int | None, Limits(at_least=0)]
    feature_map: str = added("none")
    d_features: Annotated[int | None, _SIZE] = added(None)

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_mixers()
        self._check_positions()
        if self.convolution == 1:
            raise ValueError("model.convolution = 1: one tap sees no other token; choose 0 for none, or at least 2")
        if self.objective == "masked" and self.padded_vocab_size == self.vocab_size:
            raise ValueError(
                f"model.objective = 'masked' takes the first padded row of the embedding for masked tokens: set "
                f"model.padded_vocab_size = {self.padded_vocab_size} above vocab_size = {self.vocab_size}"
            )

    def _check_sizes(self) -> None:
        check_numbers(self, "model.")
        if (n_features := self.n_heads * (2 * self.d_key + self.d_value)) >= 2**31:
            raise ValueError(
                f"model.n_heads = {self.n_heads}, d_key = {self.d_key}, d_value = {self.d_value}: the {n_features} "
                "features of all heads are more than an array can have (2^31 - 1)"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"model.padded_vocab_size = {self.padded_vocab_size} is smaller than vocab_size = {self.vocab_size}"
            )
        if self.document_token is not None and self.document_token >= self.vocab_size:
            raise ValueError(
                f"model.document_token = {self.document_token} is not an id of a vocabulary of {self.vocab_size}"
            )

    def _check_choices(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(
                f"model.dtype = {self.dtype!r}: choose float32 or bfloat16 (float64 needs JAX_ENABLE_X64; the range of "
                "float16 is too small)"
            )
        choices = {
            "remat": REMAT_POLICIES,
            "forget_gate": GATES,
            "feature_map": ("none", *LOG_FEATURES),
            "block": BLOCKS,
            "position": POSITIONS,
            "objective": OBJECTIVES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"model.{name} = {getattr(self, name)!r}: choose {', '.join(allowed)}")

    def _check_mixers(self) -> None:
        length = sum(count for _, count in self._parts)
        if self.n_layers % length:
            raise ValueError(
                f"model.attention = {self.attention!r} is a pattern of {length} layers, which does not "
                f"divide model.n_layers = {self.n_layers}; choose a kind for all ({', '.join(MIXERS)}), or a pattern "
                "whose length divides it"
            )
        for name, build in MIXERS.items():  # those without layers too: their fields must still be possible
            build(self).check_use(self.attention, is_used=name in self.pattern)
        if self.forget_gate != "none":
            self._check_gate()
        self._check_feature_map()

    def _check_gate(self) -> None:
        if not self.causal and self.implementation not in (None, "chunked"):
            raise ValueError(
                f"model.implementation = {self.implementation!r}: a forget gate in a masked model is computed in "
                "chunks; set it to chunked or None, or model.forget_gate to none"
            )
        if not any(mixer.takes_log_decay for mixer in self.mixers):
            kinds = ", ".join(kind for kind, build in MIXERS.items() if build(self).takes_log_decay)
            raise ValueError(
                f"model.forget_gate = {self.forget_gate!r} is an option of {kinds} attention, of which "
                f"model.attention = {self.attention!r} has none: set it to none"
            )
        if self.forget_gate_longest < self.forget_gate_shortest:
            raise ValueError(
                f"model.forget_gate_longest = {self.forget_gate_longest} is below model.forget_gate_shortest = "
                f"{self.forget_gate_shortest}: give time constants in tokens, such as 2 and 4096"
            )

    def _check_feature_map(self) -> None:
        if self.n_features is None:
            if self.d_features is not None:
                raise ValueError(
                    f"model.d_features = {self.d_features} is the number of a feature map's features, and there is "
                    f"none: set model.feature_map to {' or '.join(LOG_FEATURES)}, or d_features to None"
                )
            return
        if not any(mixer.takes_exponents for mixer in self.mixers):
            kinds = ", ".join(kind for kind, build in MIXERS.items() if build(self).takes_exponents)
            raise ValueError(
                f"model.feature_map = {self.feature_map!r} is an option of {kinds} attention, of which "
                f"model.attention = {self.attention!r} has none: set it to none"
            )
        if self.n_features % 2:
            raise ValueError(f"model.d_features = {self.d_features}: features come in pairs, give an even number")

    def _check_positions(self) -> None:
        if self.position == "learned" and self.n_positions is None:
            raise ValueError("model.n_positions = None: learned positions need their number, such as sequence_length")
        if self.position == "rotary" and (self.d_key % 2 or not any(mixer.uses_rotary for mixer in self.mixers)):
            kinds = " and ".join(name for name, build in MIXERS.items() if build(self).uses_rotary)
            raise ValueError(
                f"model.position = 'rotary' rotates pairs of key features in {kinds} layers: model.attention = "
                f"{self.attention!r} must have some, and model.d_key = {self.d_key} be even"
            )

    @property
    def pattern(self) -> tuple[str, ...]:
        """Kinds of attention of the layers that repeat: heinsen*3,softmax gives four. Raises ValueError."""
        return tuple(kind for kind, count in self._parts for _ in range(count))

    @property
    def _parts(self) -> list[tuple[str, int]]:
        """Parts of the pattern: heinsen*3,softmax gives (heinsen, 3) and (softmax, 1). Raises ValueError."""
        parts = []
        for part in self.attention.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*(?:\*\s*([1-9]\d*)\s*)?", part)
            if not match or match[1] not in MIXERS:
                raise ValueError(
                    f"model.attention = {self.attention!r}: {part!r} is no kind of attention; choose "
                    f"{', '.join(MIXERS)}, or a pattern such as heinsen*3,softmax"
                )
            parts.append((match[1], int(match[2] or 1)))
        return parts

    @property
    def mixers(self) -> tuple[Mixer[Any], ...]:
        """Mixers of the layers that repeat, one for each layer of `pattern`."""
        return tuple(MIXERS[name](self) for name in self.pattern)

    @property
    def layer_mixers(self) -> tuple[Mixer[Any], ...]:
        """Mixers of all layers."""
        return self.mixers * (self.n_layers // len(self.pattern))

    @property
    def n_features(self) -> int | None:
        """Number of features of the feature map, None if there is none."""
        if self.feature_map == "none":
            return None
        return 2 * self.d_key if self.d_features is None else self.d_features

    @property
    def causal(self) -> bool:
        """Whether tokens see only tokens before them."""
        return self.objective == "next_token"

    @property
    def mask_token(self) -> int:
        """The id that stands for a masked token; no text contains it."""
        return self.vocab_size

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """dtype of states and accumulators: at least float32."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def splits_sequences(self) -> bool:
        """Whether a mesh may divide the tokens of a sequence (`heinsen.ops.sharded`)."""
        return all(mixer.splits_sequences for mixer in self.mixers)

    @property
    def has_cache(self) -> bool:
        """Whether some layer's state grows with the tokens."""
        return any(mixer.has_cache for mixer in self.mixers)

    @property
    def max_positions(self) -> int | None:
        """Number of tokens that a document can have; None: any number."""
        return self.n_positions if self.position == "learned" else None


def check_causal(config: ModelConfig) -> None:
    """Raise ValueError for a masked model."""
    if not config.causal:
        raise InputError(
            "model.objective = 'masked': the model reads whole texts in both directions and predicts no next token; "
            "to generate or to continue a text take a model with objective = next_token"
        )


def check_room(config: ModelConfig, n_tokens: int) -> None:
    """Raise ValueError where a document of n_tokens goes beyond the learned positions."""
    if config.max_positions is not None and n_tokens > config.max_positions:
        raise InputError(
            f"{n_tokens} tokens go beyond the model.n_positions = {config.n_positions} positions that this model has "
            "learned: give fewer (a prompt counts too), or take a model with other positions"
        )
