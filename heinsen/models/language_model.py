"""Language models: the paper's, exactly as published (`configs/pile_125m.py`), and its variants. The only Flax import.

    x = embed(tokens);  x = x + position(x);  24 times  x = x + W3 GLU(W2 log_attention(W1 LayerNorm(x)))
    logits = LayerNorm(x) embed^T

No MLP block, no dropout, no 1/sqrt(d): queries and keys are exponents, and the layer goes on with the logarithm of the
attention. The residual stream, logarithms and scans are float32; matmul inputs are `ModelConfig.dtype`, their
accumulators float32.

In the same frame: other kinds of attention (`ATTENTION_KINDS`, of all layers or in patterns), the block of GPT-2
(`BLOCKS`), other positions (`POSITIONS`), and bidirectional models that predict masked tokens (`OBJECTIVES`).

Layers are stacked and scanned, in training and to read prompts; `forward` with parameters from `unstack` runs them one
by one, without slicing them out of the stack: to decode, where reading the parameters is most of the work.

Axes: B batch, T tokens, D d_model, H heads, K key features, V value features, L layers.
"""

import dataclasses
import math
import re
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.logspace import NEG_INF, logaddexp
from heinsen.models.cross_entropy import token_logits, token_losses, weighted_loss
from heinsen.ops import sharded, softmax, states
from heinsen.ops.api import IMPLEMENTATIONS
from heinsen.ops.api import attention as real_attention
from heinsen.ops.linear import LinearState, init_linear_state, linear_attention
from heinsen.ops.sigmoid import sigmoid_attention, sigmoid_attention_cached
from heinsen.ops.softmax import KVCache
from heinsen.ops.states import LogState, MeanState, RunningState, init_state, query_state, update_state
from heinsen.parallel import BATCH, constrain

Params = dict[str, Any]

# What the backward pass finds kept of each layer; the rest it computes again.
REMAT_POLICIES = {
    "none": None,  # no layer is computed again
    "full": None,  # only what goes into a layer
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the products with its matrices
}

ATTENTION_KINDS = ("heinsen", "softmax", "sigmoid", "linear")
VALUE_DOMAINS = ("log", "real")
BLOCKS = ("heinsen", "gpt2")
POSITIONS = ("recurrent", "learned", "rotary", "none")
OBJECTIVES = ("next_token", "masked")

_RMS = "rms"  # the collection of variables in which layers tell `activation_rms` theirs


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the model is; `configs/default.py` holds the paper's.

    vocab_size counts the tokenizer's ids; the embedding and the softmax have padded_vocab_size rows. attention is the
    kind of all layers, or a pattern that repeats, such as heinsen*3,softmax. sigmoid_alpha and sigmoid_bias are those
    of `heinsen.sigmoid_attention`; value_domain is the heinsen kind's: "log" for `heinsen.log_attention`, "real" for
    `heinsen.attention`. qk_norm normalises queries and keys by their root mean square, with learned scales. n_positions
    bounds learned positions. objective is next_token, or masked for a bidirectional model. dtype is that of matmul
    inputs. remat names what the backward pass computes again (REMAT_POLICIES). implementation is that of the heinsen
    kind (None: the best). document_token is the id that begins a document, with which the model forgets all before;
    None: it never does.
    """

    vocab_size: int
    padded_vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    d_key: int
    d_value: int
    attention: str
    sigmoid_alpha: float
    sigmoid_bias: str
    value_domain: str
    qk_norm: bool
    block: str
    position: str
    n_positions: int | None
    objective: str
    dtype: str
    remat: str
    implementation: str | None
    document_token: int | None

    def __post_init__(self):
        for name in ("vocab_size", "n_layers", "d_model", "n_heads", "d_key", "d_value", "n_positions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}: it must be at least 1")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"model.padded_vocab_size = {self.padded_vocab_size} is smaller than vocab_size = {self.vocab_size}"
            )
        if self.document_token is not None and not 0 <= self.document_token < self.vocab_size:
            raise ValueError(
                f"model.document_token = {self.document_token} is not an id of a vocabulary of {self.vocab_size}"
            )
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"model.dtype = {self.dtype!r}: choose float32 or bfloat16 (float64 needs JAX_ENABLE_X64)")
        choices = {"remat": REMAT_POLICIES, "value_domain": VALUE_DOMAINS, "block": BLOCKS, "position": POSITIONS}
        for name, allowed in (choices | {"objective": OBJECTIVES}).items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"model.{name} = {getattr(self, name)!r}: choose {', '.join(allowed)}")
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"model.implementation = {self.implementation!r}: choose {sorted(IMPLEMENTATIONS)} or None"
            )
        self._check_attention()
        if self.position == "learned" and self.n_positions is None:
            raise ValueError("model.n_positions = None: learned positions need their number, such as sequence_length")
        if self.position == "rotary" and (self.d_key % 2 or not {"softmax", "sigmoid"} & set(self.pattern)):
            raise ValueError(
                f"model.position = 'rotary' rotates pairs of key features in softmax and sigmoid layers: "
                f"model.attention = {self.attention!r} must have some, and model.d_key = {self.d_key} be even"
            )
        if self.objective == "masked" and self.padded_vocab_size == self.vocab_size:
            raise ValueError(
                f"model.objective = 'masked' takes the first padded row of the embedding for masked tokens: set "
                f"model.padded_vocab_size = {self.padded_vocab_size} above vocab_size = {self.vocab_size}"
            )

    def _check_attention(self):
        if self.n_layers % len(self.pattern):
            raise ValueError(
                f"model.attention = {self.attention!r} is a pattern of {len(self.pattern)} layers, which does not "
                f"divide model.n_layers = {self.n_layers}; choose a kind for all ({', '.join(ATTENTION_KINDS)}), or a "
                "pattern whose length divides it"
            )
        if "softmax" in self.pattern and self.d_key != self.d_value:
            raise ValueError(
                f"softmax attention needs model.d_key = {self.d_key} and model.d_value = {self.d_value} to be equal"
            )
        if not math.isfinite(self.sigmoid_alpha):
            raise ValueError(f"model.sigmoid_alpha = {self.sigmoid_alpha}: it must be finite")
        try:
            finite = self.bias == "-log_n" or math.isfinite(self.bias)
        except ValueError:
            finite = False
        if not finite:
            raise ValueError(f"model.sigmoid_bias = {self.sigmoid_bias!r}: expected a finite number, or -log_n")
        if self.value_domain == "real" and "heinsen" not in self.pattern:
            raise ValueError(
                f"model.value_domain = 'real' is an option of heinsen attention, of which model.attention = "
                f"{self.attention!r} has none: set it to log"
            )

    @property
    def bias(self) -> float | Literal["-log_n"]:
        """The sigmoid's, by sigmoid_bias. Raises ValueError."""
        return "-log_n" if self.sigmoid_bias == "-log_n" else float(self.sigmoid_bias)

    @property
    def causal(self) -> bool:
        return self.objective == "next_token"

    @property
    def mask_token(self) -> int:
        """The id in a masked token's place, which no text has."""
        return self.vocab_size

    @property
    def splits_sequences(self) -> bool:
        """Whether a mesh may divide a sequence's tokens (`heinsen.ops.sharded`)."""
        return self.causal and set(self.pattern) == {"heinsen"} and self.value_domain == "log"

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of attention of the layers that repeat: heinsen*3,softmax gives four. Raises ValueError."""
        kinds = []
        for part in self.attention.split(","):
            found = re.fullmatch(r"\s*(\w+)\s*(?:\*\s*([1-9]\d*)\s*)?", part)
            if not found or found[1] not in ATTENTION_KINDS:
                raise ValueError(
                    f"model.attention = {self.attention!r}: {part!r} is no kind of attention; choose "
                    f"{', '.join(ATTENTION_KINDS)}, or a pattern such as heinsen*3,softmax"
                )
            kinds += [found[1]] * int(found[2] or 1)
        return tuple(kinds)

    def kind(self, layer: int) -> str:
        return self.pattern[layer % len(self.pattern)]

    @property
    def has_cache(self) -> bool:
        """Whether some layer's state grows with the tokens."""
        return not {"softmax", "sigmoid"}.isdisjoint(self.pattern)


LayerState = LogState | RunningState | MeanState | LinearState | KVCache


class ModelState(NamedTuple):
    """All the model remembers of the tokens seen. Without caches it has one size, however many they were."""

    position: Float[Array, "B D"]
    attention: tuple[LayerState, ...]  # of each layer, with leading axis B
    n_tokens: Int[Array, " B"]  # seen since the state was empty: the next slot of the caches
    document_start: Int[Array, " B"]  # the slot of the present document's first token


class Tokens(NamedTuple):
    """Where the tokens of a call stand: what attention has to know of them besides queries, keys and values."""

    slot: Int[Array, "B T"]  # how many tokens came before
    first: Int[Array, "B T"]  # the slot of the first token that each sees
    valid: Bool[Array, "B T"] | None  # false where a row is padded at its end; None: all are tokens
    segment_ids: Int[Array, "B 1 T"] | None


def init_model_state(config: ModelConfig, batch_size: int, capacity: int = 0) -> ModelState:
    """The state before any token: e_0 = 0 in the position recurrence, empty attention states.

    Caches have room for `capacity` tokens (`with_capacity` gives them more). Raises ValueError for masked models.
    """
    _check_causal(config)
    batch = batch_size, config.n_heads

    def layer_state(kind):
        if kind == "heinsen":
            signed = config.value_domain == "real"
            return init_state(batch, config.d_key, config.d_value, signed=signed, dtype=_accumulator(config))
        if kind == "linear":
            return init_linear_state(batch, config.d_key, config.d_value, dtype=_accumulator(config))
        return softmax.init_cache(*batch, capacity, config.d_key, config.d_value, config.dtype)

    return _nothing_before(config, batch_size)._replace(
        attention=tuple(layer_state(config.kind(i)) for i in range(config.n_layers))
    )


def _nothing_before(config: ModelConfig, batch_size: int) -> ModelState:
    """The state before any token, without the layers' own."""
    none = jnp.zeros(batch_size, jnp.int32)
    return ModelState(
        jnp.zeros((batch_size, config.d_model), _accumulator(config)), (None,) * config.n_layers, none, none
    )


def _check_causal(config: ModelConfig) -> None:
    if not config.causal:
        raise ValueError(
            "model.objective = 'masked': the model reads whole texts in both directions and predicts no next token; "
            "to generate or to continue a text take a model with objective = next_token"
        )


def check_room(config: ModelConfig, n_tokens: int) -> None:
    """Raises ValueError where a document of n_tokens goes beyond the learned positions."""
    if config.position == "learned" and n_tokens > config.n_positions:
        raise ValueError(
            f"{n_tokens} tokens go beyond the model.n_positions = {config.n_positions} positions that this model has "
            "learned: give fewer (a prompt counts too), or take a model with other positions"
        )


def with_capacity(state: ModelState, capacity: int) -> ModelState:
    """The same state with room for `capacity` tokens in its caches."""
    attention = (softmax.with_capacity(s, capacity) if isinstance(s, KVCache) else s for s in state.attention)
    return state._replace(attention=tuple(attention))


def capacity(state: ModelState) -> int | None:
    """For how many tokens the caches have room; None: there are none."""
    return next((s.k.shape[-2] for s in state.attention if isinstance(s, KVCache)), None)


def forget(config: ModelConfig, state: ModelState, rows: Bool[Array, " B"]) -> ModelState:
    """The state, of those rows as before any token."""
    empty = init_model_state(config, rows.shape[0])

    def pick(new, old):
        return jax.tree.map(lambda n, o: jnp.where(rows.reshape((-1,) + (1,) * (o.ndim - 1)), n, o), new, old)

    def of_layer(new, old):
        if isinstance(old, KVCache):
            return old  # its slots are free again
        if isinstance(old, RunningState):
            new = states.begin_steps(new)._replace(smallest=old.smallest)
        return pick(new, old)

    attention = tuple(map(of_layer, empty.attention, state.attention))
    rest = pick(empty._replace(attention=()), state._replace(attention=()))
    return rest._replace(attention=attention)


def _accumulator(config: ModelConfig) -> Any:
    return jnp.promote_types(config.dtype, jnp.float32)


def init_params(config: ModelConfig, key: Array) -> Params:
    """Fresh float32 parameters as nested dicts; those of the layers are stacked along a leading axis.

    Of a pattern of P > 1 layers, params["layers"]["layer_0"] to ["layer_{P-1}"] hold each place's L / P layers.
    """
    return LanguageModel(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def abstract_params(config: ModelConfig) -> Params:
    """The shapes and dtypes of `init_params`, without the numbers."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def unstack(config: ModelConfig, params: Params) -> Params:
    """The parameters with each layer's own, for `forward` to run the layers one by one."""
    period = len(config.pattern)
    layers = params["layers"] if period > 1 else {"layer_0": params["layers"]}
    own = {
        f"layer_{i}": jax.tree.map(lambda p, i=i: p[i // period], layers[f"layer_{i % period}"])
        for i in range(config.n_layers)
    }
    return {name: x for name, x in params.items() if name != "layers"} | own


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array, " B"] | None = None,
    last_only: bool = False,
) -> tuple[Float[Array, "B T padded_vocab"] | Float[Array, "B padded_vocab"], ModelState]:
    """Logits of every next token, and the state after the last; `state` is what came before (None: nothing).

    Args:
      params: of `init_params`, or of `unstack`; "head", if there, makes the logits in the embedding's stead.
      lengths: how many tokens each row has, where rows are padded at their end; None: T.
      last_only: logits of each row's last token only, [B, padded_vocab] (of its first, where a row has none).

    Beyond learned positions (`check_room`) logits are NaN. Raises ValueError for masked models (`masked_logits`).
    """
    x, state = hidden_states(config, params, tokens, state, lengths)
    if last_only:
        last = jnp.full(x.shape[0], x.shape[1] - 1) if lengths is None else jnp.maximum(lengths - 1, 0)
        return logits_of(config, params, jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]), state
    return token_logits(x, params.get("head", params["embedding"]), config.dtype), state


def logits_of(config: ModelConfig, params: Params, x: Float[Array, "B D"]) -> Float[Array, "B padded_vocab"]:
    """The logits that hidden states make, of one token a sequence."""
    # The embedding first: XLA's CPU library is up to twice as fast so.
    return _matmul(params.get("head", params["embedding"]), x.T, config.dtype).T


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], ModelState]:
    """What `forward` makes its logits of, by a product with the embedding; arguments, state and errors as there."""
    _check_causal(config)
    return LanguageModel(config, stacked="layers" in params).apply({"params": params}, tokens, state, lengths)


def next_token_losses(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T+1"],
    mesh: Mesh | None = None,
    state: ModelState | None = None,
    return_state: bool = False,
) -> Float[Array, "B T"] | tuple[Float[Array, "B T"], ModelState]:
    """Negative log-likelihood of every token but each sequence's first, in nats; whole logits are never in memory.

    `state` is what came before (None: nothing). With return_state also the state after all tokens but the last.
    """
    _check_causal(config)
    x_BxTxD, embedding, state = _hidden(config, params, tokens[:, :-1], mesh, state, return_state)
    losses_BxT = token_losses(x_BxTxD, embedding, tokens[:, 1:], config.dtype, mesh)
    return (losses_BxT, state) if return_state else losses_BxT


def mean_loss(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T+1"],
    mesh: Mesh | None = None,
    weights: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean of the next-token losses by `weights` (None: equal), made to be differentiated."""
    _check_causal(config)
    tokens = jnp.asarray(tokens)
    x_BxTxD, embedding, _ = _hidden(config, params, tokens[:, :-1], mesh)
    targets_BxT = tokens[:, 1:]
    if weights is None:
        weights_BxT = jnp.full(targets_BxT.shape, 1 / targets_BxT.size, x_BxTxD.dtype)
    else:
        weights_BxT = (weights / jnp.sum(weights)).astype(x_BxTxD.dtype)
    return weighted_loss(x_BxTxD, embedding, targets_BxT, weights_BxT, config.dtype, mesh)


def masked_logits(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], mesh: Mesh | None = None
) -> Float[Array, "B T padded_vocab"]:
    """A masked model's logits of every token in its own place; `config.mask_token` stands for those not known."""
    x_BxTxD, embedding, _ = _hidden(config, params, tokens, mesh)
    return token_logits(x_BxTxD, embedding, config.dtype)


def masked_losses(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    mesh: Mesh | None = None,
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target in the place of the token there, by a masked model, in nats."""
    x_BxTxD, embedding, _ = _hidden(config, params, tokens, mesh)
    return token_losses(x_BxTxD, embedding, targets, config.dtype, mesh)


def masked_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """The mean by batch["weights"] of the `masked_losses` of ["tokens"] and ["targets"], to be differentiated."""
    x_BxTxD, embedding, _ = _hidden(config, params, batch["tokens"], mesh)
    weights_BxT = (batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1)).astype(x_BxTxD.dtype)
    return weighted_loss(x_BxTxD, embedding, batch["targets"], weights_BxT, config.dtype, mesh)


def activation_rms(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], mesh: Mesh | None = None
) -> dict[str, Float[Array, " L"]]:
    """Root mean squares, layer by layer: "attention", of what it gives on (the paper's: log y); "residual", after it.

    Of parameters that are stacked, as `init_params` makes them.
    """
    model = LanguageModel(config, mesh)
    _, found = model.apply({"params": params}, tokens, keep_state=False, mutable=[_RMS])
    period, layers = len(config.pattern), found[_RMS]["layers"]
    places = [layers] if period == 1 else [layers[f"layer_{j}"] for j in range(period)]
    return {name: jnp.stack([place[name] for place in places], axis=1).reshape(-1) for name in places[0]}


def _hidden(config, params, tokens, mesh, state=None, keep_state=False):
    """The last hidden states, the embedding, gathered once for both of its uses, and the model's state if kept."""
    params = params | {"embedding": constrain(mesh, params["embedding"])}
    apply = LanguageModel(config, mesh).apply
    x_BxTxD, state = apply({"params": params}, tokens, state, keep_state=keep_state)
    return x_BxTxD, params["embedding"], state


def count_params(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class LanguageModel(nn.Module):
    """On a mesh the batch divides over data x fsdp, tokens over sequence, heads over tensor (`heinsen.parallel`)."""

    config: ModelConfig
    mesh: Mesh | None = None
    stacked: bool = True  # whether the layers' parameters are

    @nn.compact
    def __call__(
        self,
        tokens_BxT: Array,
        state: ModelState | None = None,
        lengths_B: Array | None = None,
        keep_state: bool = True,
    ) -> tuple[Array, ModelState | None]:
        """(hidden states [B, T, D], of which the embedding makes logits; the state after all tokens)."""
        c = self.config
        n_batch, n_tokens = tokens_BxT.shape
        keep_state = keep_state and c.causal
        embedding = self.param("embedding", _initial(c, c.d_model), (c.padded_vocab_size, c.d_model))
        x_BxTxD = jnp.take(embedding, tokens_BxT, axis=0)
        begins_BxT = None if c.document_token is None else tokens_BxT == c.document_token
        # No attention states, rather than empty ones: those would exist for all layers at once.
        before = _nothing_before(c, n_batch) if state is None else state
        if begins_BxT is not None and state is not None:
            before = _forget_where_it_begins(c, before, begins_BxT[:, 0], n_tokens)
        tokens = _tokens(before, n_tokens, lengths_B, begins_BxT)
        x_BxTxD = _of_tokens(self.mesh, x_BxTxD)
        position_BxD = before.position
        if c.position == "recurrent":
            e_BxTxD = Position(c, self.mesh, name="position")(x_BxTxD, position_BxD, begins_BxT, tokens.valid)
            x_BxTxD, position_BxD = x_BxTxD + e_BxTxD, e_BxTxD[:, -1]
        elif c.position == "learned":
            if c.document_token is None and lengths_B is None:
                check_room(c, n_tokens)
            x_BxTxD = x_BxTxD + LearnedPosition(c, name="position")(tokens)
        x_BxTxD, attention = self._layers(x_BxTxD, before.attention, tokens, keep_state)
        x_BxTxD = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        if not keep_state:
            return x_BxTxD, None
        n_seen = before.n_tokens + (n_tokens if lengths_B is None else lengths_B)
        start = jnp.take_along_axis(tokens.first, jnp.maximum(n_seen - before.n_tokens - 1, 0)[:, None], axis=1)[:, 0]
        return x_BxTxD, ModelState(position_BxD, attention, n_seen, start)

    def _layers(self, x_BxTxD, states, tokens, keep_state):
        c, period = self.config, len(self.config.pattern)
        if not self.stacked:
            after = []
            for i, state in enumerate(states):
                x_BxTxD, state = Layer(c, c.kind(i), self.mesh, name=f"layer_{i}")(x_BxTxD, state, tokens, keep_state)
                after.append(state)
            return x_BxTxD, tuple(after)
        module, arguments = (Layers, (c, self.mesh)) if period > 1 else (Layer, (c, c.kind(0), self.mesh))
        if c.remat != "none":
            module = nn.remat(module, prevent_cse=False, policy=REMAT_POLICIES[c.remat], static_argnums=(4,))
        scanned = nn.scan(
            module,
            variable_axes={"params": 0, _RMS: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            out_axes=0,
            length=c.n_layers // period,
        )
        stack = lambda *states: jax.tree.map(lambda *x: jnp.stack(x), *states)
        stacks = tuple(stack(*states[j::period]) for j in range(period))
        run = scanned(*arguments, name="layers")
        x_BxTxD, stacks = run(x_BxTxD, stacks if period > 1 else stacks[0], tokens, keep_state)
        if not keep_state:
            return x_BxTxD, None
        stacks = stacks if period > 1 else (stacks,)
        return x_BxTxD, tuple(
            jax.tree.map(lambda x, i=i: x[i // period], stacks[i % period]) for i in range(c.n_layers)
        )


def _forget_where_it_begins(config, state, rows_B, n_tokens):
    if n_tokens > 1:
        return forget(config, state, rows_B)
    # In decoding, where the state is most of what is read besides the parameters.
    return jax.lax.cond(jnp.any(rows_B), lambda state: forget(config, state, rows_B), lambda state: state, state)


def _tokens(before: ModelState, n_tokens: int, lengths_B: Array | None, begins_BxT: Array | None) -> Tokens:
    slot = before.n_tokens[:, None] + jnp.arange(n_tokens)
    first = jnp.broadcast_to(before.document_start[:, None], slot.shape)
    segment_ids = None
    if begins_BxT is not None:
        first = jax.lax.cummax(jnp.where(begins_BxT, slot, first), axis=1)
        segment_ids = jnp.cumsum(begins_BxT, axis=-1)[:, None]
    valid = None if lengths_B is None else jnp.arange(n_tokens) < lengths_B[:, None]
    return Tokens(slot, first, valid, segment_ids)


def _of_tokens(mesh: Mesh | None, x_BxTxD: Array) -> Array:
    """The residual stream, which only the batch and the tokens divide."""
    return constrain(mesh, x_BxTxD, BATCH, "sequence", None)


class Position(nn.Module):
    """e_t = logaddexp(e_{t-1} + log_a_t, l_t), with log_a = log_sigmoid(c) and (c, l) a dense map of the embedding.

    In a bidirectional model the sum of two, with maps of their own: of the tokens so far, and of those from the end on.
    """

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x_BxTxD: Array, initial_BxD: Array, begins_BxT: Array | None = None, valid_BxT: Array | None = None
    ) -> Array:
        n_maps = 2 if self.config.causal else 4
        maps = jnp.split(Dense(n_maps * self.config.d_model, self.config.dtype, name="dense")(x_BxTxD), n_maps, axis=-1)
        e_BxTxD = self._recurrence(*maps[:2], initial_BxD, begins_BxT, valid_BxT)
        if self.config.causal:
            return e_BxTxD
        flip = lambda x: jnp.flip(x, axis=1)
        # From the end, a document begins with its last token.
        ends_BxT = None if begins_BxT is None else jnp.pad(begins_BxT[:, 1:], [(0, 0), (0, 1)])
        from_end = (None if x is None else flip(x) for x in (ends_BxT, valid_BxT))
        return e_BxTxD + flip(self._recurrence(*map(flip, maps[2:]), initial_BxD, *from_end))

    def _recurrence(self, c, log_b, initial_BxD, begins_BxT, valid_BxT):
        log_a = nn.log_sigmoid(c)
        if begins_BxT is not None:  # e_{t-1} is 0 there, as before any token
            begins = begins_BxT[..., None]
            log_b = jnp.where(begins, logaddexp(log_a, log_b), log_b)
            log_a = jnp.where(begins, NEG_INF, log_a)
        if valid_BxT is not None:  # what is no token changes nothing
            log_a = jnp.where(valid_BxT[..., None], log_a, 0.0)
            log_b = jnp.where(valid_BxT[..., None], log_b, NEG_INF)
        if log_b.shape[1] == 1:
            return logaddexp(initial_BxD[:, None] + log_a, log_b)
        return sharded.log_linear_recurrence(self.mesh, log_a, log_b, initial_BxD)


class LearnedPosition(nn.Module):
    """A row of a table for each place in a document; NaN beyond the last."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: Tokens) -> Array:
        c, places_BxT = self.config, tokens.slot - tokens.first
        if tokens.valid is not None:  # padding may lie beyond the last
            places_BxT = jnp.where(tokens.valid, places_BxT, 0)
        table = self.param("embedding", _initial(c, c.d_model), (c.n_positions, c.d_model))
        return jnp.take(table, places_BxT, axis=0, mode="fill", fill_value=jnp.nan)


class Layers(nn.Module):
    """Those of one period of the config's pattern, where it has more than one layer: what is scanned."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x_BxTxD: Array, states: tuple[LayerState | None, ...], tokens: Tokens, keep_state: bool
    ) -> tuple[Array, tuple[LayerState | None, ...]]:
        pattern, after = self.config.pattern, []
        for j, (kind, state) in enumerate(zip(pattern, states, strict=True)):
            x_BxTxD, state = Layer(self.config, kind, self.mesh, name=f"layer_{j}")(x_BxTxD, state, tokens, keep_state)
            after.append(state)
        return x_BxTxD, tuple(after)


class Layer(nn.Module):
    """x + W3 GLU(W2 attention(split(W1 LayerNorm(x)))); also the attention's state after the last token, if kept.

    The paper's attention takes W1's last part for logarithms of values and gives that of y; all others take it for
    values. GPT-2's block is  x = x + Wo attention(split(W1 LayerNorm(x)));  x + Wout gelu(Win LayerNorm(x)).
    """

    config: ModelConfig
    kind: str
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x_BxTxD: Array, state: LayerState | None, tokens: Tokens, keep_state: bool
    ) -> tuple[Array, LayerState | None]:
        c = self.config
        n_batch, n_tokens, _ = x_BxTxD.shape
        gpt2 = c.block == "gpt2"
        # GPT-2's deviations: each of its layers adds to the residual stream twice.
        deviation = 0.02 if gpt2 else None
        of_residual = deviation and deviation / math.sqrt(2 * c.n_layers)
        h = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        h = Dense(c.n_heads * (2 * c.d_key + c.d_value), c.dtype, deviation=deviation, name="w1")(h)
        h_BxHxTxC = h.reshape(n_batch, n_tokens, c.n_heads, -1).swapaxes(1, 2)
        q, k, values = jnp.split(h_BxHxTxC, (c.d_key, 2 * c.d_key), axis=-1)
        if c.qk_norm:
            scale = lambda name: self.param(name, nn.initializers.ones, (c.n_heads, c.d_key))
            q, k = _rms_norm(q, scale("q_scale")), _rms_norm(k, scale("k_scale"))
        y_BxHxTxV, state = _attend(c, self.kind, self.mesh, q, k, values, state, tokens)
        y = y_BxHxTxV.swapaxes(1, 2).reshape(n_batch, n_tokens, -1)
        self._tell_rms("attention", y)
        if gpt2:
            x_BxTxD = x_BxTxD + Dense(c.d_model, c.dtype, deviation=of_residual, name="attention_out")(y)
            h = nn.LayerNorm(epsilon=1e-5, name="mlp_norm")(_of_tokens(self.mesh, x_BxTxD))
            h = nn.gelu(Dense(4 * c.d_model, c.dtype, deviation=deviation, name="mlp_in")(h), approximate=True)
            x_BxTxD = x_BxTxD + Dense(c.d_model, c.dtype, deviation=of_residual, name="mlp_out")(h)
        else:
            h = nn.glu(Dense(2 * c.d_model, c.dtype, name="w2")(y))
            x_BxTxD = x_BxTxD + Dense(c.d_model, c.dtype, use_bias=False, name="w3")(h)
        self._tell_rms("residual", x_BxTxD)
        return _of_tokens(self.mesh, x_BxTxD), state if keep_state else None

    def _tell_rms(self, name: str, x: Array) -> None:
        """To `activation_rms`, where that is what is asked for."""
        if self.is_mutable_collection(_RMS) and not self.is_initializing():
            rms = jnp.sqrt(jnp.mean(jnp.square(x.astype(_accumulator(self.config)))))
            self.sow(_RMS, name, rms, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def _rms_norm(x_BxHxTxK: Array, scale_HxK: Array) -> Array:
    return x_BxHxTxK * jax.lax.rsqrt(jnp.mean(x_BxHxTxK**2, axis=-1, keepdims=True) + 1e-5) * scale_HxK[:, None]


def _attend(config, kind, mesh, q, k, values, state, tokens):
    """One layer's attention: (log y for the paper's, else y; the state after all tokens)."""
    if tokens.valid is not None and kind in ("heinsen", "linear"):
        k = jnp.where(tokens.valid[:, None, :, None], k, NEG_INF)
    if config.position == "rotary" and kind in ("softmax", "sigmoid"):
        places = tokens.slot - tokens.first
        q, k = _rotate(q, places), _rotate(k, places)
    if kind == "heinsen" and config.value_domain == "log":
        if isinstance(state, RunningState):
            log_y, state = states.take_step(state, q[:, :, 0], k[:, :, 0], values[:, :, 0])
            return log_y[:, :, None], state
        segment_ids = tokens.segment_ids
        return sharded.log_attention(
            mesh, q, k, values, state, segment_ids, config.implementation, causal=config.causal
        )
    attend = {"heinsen": _heinsen, "softmax": _softmax, "sigmoid": _sigmoid, "linear": _linear}[kind]
    return sharded.over_heads(mesh, partial(attend, config))(q, k, values, state, tokens)


def _heinsen(config, q, k, v, state, tokens):
    if state is not None and q.shape[-2] == 1:
        state = update_state(state, k[:, :, 0], v[:, :, 0])
        return query_state(state, q), state
    options = dict(causal=config.causal, segment_ids=tokens.segment_ids, implementation=config.implementation)
    return real_attention(q, k, v, state=state, return_state=True, **options)


def _linear(config, q, k, v, state, tokens):
    options = dict(causal=config.causal, segment_ids=tokens.segment_ids)
    return linear_attention(q, k, v, state=state, return_state=True, **options)


def _softmax(config, q, k, v, state, tokens):
    q, k, v = (x.astype(config.dtype) for x in (q, k, v))
    if state is None:
        return softmax.softmax_attention(q, k, v, tokens.segment_ids, config.causal), KVCache(k, v)
    if q.shape[-2] == 1 and tokens.valid is None:
        return softmax.step_cached(q, k, v, state, tokens.slot, tokens.first)
    cache = softmax.append(state, k, v, tokens.slot, tokens.valid)
    return softmax.attend_cached(q, cache, tokens.slot, tokens.first), cache


def _sigmoid(config, q, k, v, state, tokens):
    q, k, v = (x.astype(config.dtype) for x in (q, k, v))
    of_config = dict(alpha=config.sigmoid_alpha, bias=config.bias)
    if state is None:
        options = dict(causal=config.causal, segment_ids=tokens.segment_ids, **of_config)
        return sigmoid_attention(q, k, v, **options), KVCache(k, v)
    cache = softmax.append(state, k, v, tokens.slot, tokens.valid)
    n, offset, first = tokens.slot[:, -1:] + 1, tokens.slot[:, :1], tokens.first[:, None]
    return sigmoid_attention_cached(q, cache.k, cache.v, n, offset=offset, first=first, **of_config), cache


def _rotate(x_BxHxTxK: Array, places_BxT: Array) -> Array:
    """Rotary positions: feature i and feature i + K/2, turned by the place times 10000^(-2i/K)."""
    half = x_BxHxTxK.shape[-1] // 2
    angles = places_BxT[:, None, :, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x_BxHxTxK[..., :half], x_BxHxTxK[..., half:]
    cos, sin = jnp.cos(angles).astype(a.dtype), jnp.sin(angles).astype(a.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Dense(nn.Module):
    """x W + b; inputs in `dtype`, output and accumulation float32.

    Weights and bias begin uniform(-1, 1)/sqrt(fan_in); or, with a deviation, weights normal with it and a bias of 0.
    """

    features: int
    dtype: str
    use_bias: bool = True
    deviation: float | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fan_in = x.shape[-1]
        of_weights, of_bias = _uniform(fan_in), _uniform(fan_in)
        if self.deviation is not None:
            of_weights, of_bias = nn.initializers.normal(self.deviation), nn.initializers.zeros
        y = _matmul(x, self.param("kernel", of_weights, (fan_in, self.features)), self.dtype)
        return y + self.param("bias", of_bias, (self.features,)) if self.use_bias else y


def _initial(config: ModelConfig, fan_in: int):
    """How the block's embeddings begin."""
    return nn.initializers.normal(0.02) if config.block == "gpt2" else _uniform(fan_in)


def _uniform(fan_in: int):
    """Initialiser uniform(-1, 1)/sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / jnp.sqrt(fan_in).astype(dtype)

    return init


def _matmul(x: Array, w: Array, dtype: str) -> Array:
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=accumulator)
