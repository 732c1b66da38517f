"""The paper's language model, exactly as published (the 125M model is `configs/pile_125m.py`). The only Flax import.

    x = embed(tokens);  x = x + position(x);  24 times  x = x + W3 GLU(W2 log_attention(W1 LayerNorm(x)))
    logits = LayerNorm(x) embed^T

No MLP block, no dropout, no 1/sqrt(d): queries and keys are exponents, and the layer goes on with the logarithm of the
attention. The residual stream, logarithms and scans are float32; matmul inputs are `ModelConfig.dtype`, their
accumulators float32.

Axes: B batch, T tokens, D d_model, H heads, K key features, V value features, L layers.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.attention import IMPLEMENTATIONS, LogState, init_state, sharded
from heinsen.logspace import NEG_INF, logaddexp
from heinsen.loss import token_logits, token_losses, weighted_loss
from heinsen.parallel import BATCH, constrain

Params = dict[str, Any]

# What the backward pass finds kept of each layer; the rest it computes again.
REMAT_POLICIES = {
    "none": None,  # no layer is computed again
    "full": None,  # only what goes into a layer
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the products with its matrices
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `configs/default.py` holds the paper's.

    vocab_size counts the tokenizer's ids; the embedding and the softmax have padded_vocab_size rows. dtype is that of
    matmul inputs. remat names what the backward pass computes again (REMAT_POLICIES). implementation is log_attention's
    (None: the best).
    document_token is the id that begins a document, with which the model forgets all before; None: it never does.
    """

    vocab_size: int
    padded_vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    d_key: int
    d_value: int
    dtype: str
    remat: str
    implementation: str | None
    document_token: int | None

    def __post_init__(self):
        for name in ("vocab_size", "n_layers", "d_model", "n_heads", "d_key", "d_value"):
            if getattr(self, name) < 1:
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
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"model.remat = {self.remat!r}: choose {', '.join(REMAT_POLICIES)}")
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"model.implementation = {self.implementation!r}: choose {sorted(IMPLEMENTATIONS)} or None"
            )


class ModelState(NamedTuple):
    """All the model remembers of the tokens seen: one size, however many they were."""

    position: Float[Array, "B D"]
    attention: LogState  # with leading axes [L, B, H]


def init_model_state(config: ModelConfig, batch_size: int) -> ModelState:
    """The state before any token: e_0 = 0 in the position recurrence, empty attention states."""
    attention = init_state((config.n_layers, batch_size, config.n_heads), config.d_key, config.d_value)
    return ModelState(_no_position(config, batch_size), attention)


def forget(config: ModelConfig, state: ModelState, rows_B: Bool[Array, " B"]) -> ModelState:
    """The state of those rows as before any token, of the others as it is."""
    empty = init_model_state(config, rows_B.shape[0])
    pick = lambda axis: lambda new, old: jnp.where(rows_B.reshape((-1,) + (1,) * (old.ndim - 1 - axis)), new, old)
    return ModelState(pick(0)(empty.position, state.position), jax.tree.map(pick(1), empty.attention, state.attention))


def _no_position(config: ModelConfig, batch_size: int) -> Array:
    return jnp.zeros((batch_size, config.d_model), jnp.promote_types(config.dtype, jnp.float32))


def init_params(config: ModelConfig, key: Array) -> Params:
    """Fresh float32 parameters as nested dicts; those of the layers are stacked along a leading axis L."""
    return LanguageModel(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def forward(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], state: ModelState | None = None
) -> tuple[Float[Array, "B T padded_vocab"], ModelState]:
    """Logits of every next token, and the state after the last; `state` is what came before (None: nothing)."""
    return LanguageModel(config).apply({"params": params}, tokens, state)


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
    x_BxTxD, embedding, state = _hidden(config, params, tokens[:, :-1], mesh, state)
    losses_BxT = token_losses(x_BxTxD, embedding, tokens[:, 1:], config.dtype, mesh)
    return (losses_BxT, state) if return_state else losses_BxT


def mean_loss(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T+1"],
    mesh: Mesh | None = None,
    weights: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """The mean of the next tokens' losses, by their weights (None: equal), to be differentiated: see `heinsen.loss`."""
    tokens = jnp.asarray(tokens)
    x_BxTxD, embedding, _ = _hidden(config, params, tokens[:, :-1], mesh)
    targets_BxT = tokens[:, 1:]
    if weights is None:
        weights_BxT = jnp.full(targets_BxT.shape, 1 / targets_BxT.size, x_BxTxD.dtype)
    else:
        weights_BxT = (weights / jnp.sum(weights)).astype(x_BxTxD.dtype)
    return weighted_loss(x_BxTxD, embedding, targets_BxT, weights_BxT, config.dtype, mesh)


def _hidden(config, params, tokens, mesh, state=None):
    """The last hidden states, the embedding, gathered once for both of its uses, and the model's state."""
    params = params | {"embedding": constrain(mesh, params["embedding"])}
    x_BxTxD, state = LanguageModel(config, mesh).apply({"params": params}, tokens, state, with_logits=False)
    return x_BxTxD, params["embedding"], state


def count_params(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class LanguageModel(nn.Module):
    """On a mesh the batch divides over data x fsdp, tokens over sequence, heads over tensor (`heinsen.parallel`)."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, tokens_BxT: Array, state: ModelState | None = None, with_logits: bool = True
    ) -> tuple[Array, ModelState]:
        """(logits [B, T, padded_vocab], or without them the hidden states [B, T, D] that they are made of; state)."""
        c = self.config
        embedding = self.param("embedding", _uniform(c.d_model), (c.padded_vocab_size, c.d_model))
        x_BxTxD = jnp.take(embedding, tokens_BxT, axis=0)
        # No attention states, rather than empty ones: those would exist for all layers at once.
        is_first = state is None
        if is_first:
            state = ModelState(_no_position(c, tokens_BxT.shape[0]), None)
        begins_BxT = segment_ids = None
        if c.document_token is not None:
            begins_BxT = tokens_BxT == c.document_token
            segment_ids = jnp.cumsum(begins_BxT, axis=-1)[:, None]
            state = state if is_first else forget(c, state, begins_BxT[:, 0])
        x_BxTxD = _of_tokens(self.mesh, x_BxTxD)
        position_BxTxD = Position(c, self.mesh, name="position")(x_BxTxD, state.position, begins_BxT)
        x_BxTxD = x_BxTxD + position_BxTxD
        layer = Layer
        if c.remat != "none":
            layer = nn.remat(Layer, prevent_cse=False, policy=REMAT_POLICIES[c.remat])
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            out_axes=0,
            length=c.n_layers,
        )
        x_BxTxD, attention = layers(c, self.mesh, name="layers")(x_BxTxD, state.attention, segment_ids)
        x_BxTxD = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        out = token_logits(x_BxTxD, embedding, c.dtype) if with_logits else x_BxTxD
        return out, ModelState(position_BxTxD[:, -1], attention)


def _of_tokens(mesh: Mesh | None, x_BxTxD: Array) -> Array:
    """The residual stream, which only the batch and the tokens divide."""
    return constrain(mesh, x_BxTxD, BATCH, "sequence", None)


class Position(nn.Module):
    """e_t = logaddexp(e_{t-1} + log_a_t, l_t), with log_a = log_sigmoid(c) and (c, l) a dense map of the embedding."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x_BxTxD: Array, initial_BxD: Array, begins_BxT: Array | None = None) -> Array:
        c, log_b = jnp.split(Dense(2 * self.config.d_model, self.config.dtype, name="dense")(x_BxTxD), 2, axis=-1)
        log_a = nn.log_sigmoid(c)
        if begins_BxT is not None:  # e_{t-1} is 0 there, as before any token
            begins = begins_BxT[..., None]
            log_b = jnp.where(begins, logaddexp(log_a, log_b), log_b)
            log_a = jnp.where(begins, NEG_INF, log_a)
        return sharded.log_linear_recurrence(self.mesh, log_a, log_b, initial_BxD)


class Layer(nn.Module):
    """x + W3 GLU(W2 log_attention(split(W1 LayerNorm(x)))); also the attention state after the last token."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x_BxTxD: Array, state: LogState | None, segment_ids: Array | None = None
    ) -> tuple[Array, LogState]:
        c = self.config
        n_batch, n_tokens, _ = x_BxTxD.shape
        h = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        h = Dense(c.n_heads * (2 * c.d_key + c.d_value), c.dtype, name="w1")(h)
        h_BxHxTxC = h.reshape(n_batch, n_tokens, c.n_heads, -1).swapaxes(1, 2)
        q, k, log_v = jnp.split(h_BxHxTxC, (c.d_key, 2 * c.d_key), axis=-1)
        log_y_BxHxTxV, state = sharded.log_attention(self.mesh, q, k, log_v, state, segment_ids, c.implementation)
        log_y = log_y_BxHxTxV.swapaxes(1, 2).reshape(n_batch, n_tokens, -1)
        h = nn.glu(Dense(2 * c.d_model, c.dtype, name="w2")(log_y))
        x_BxTxD = x_BxTxD + Dense(c.d_model, c.dtype, use_bias=False, name="w3")(h)
        return _of_tokens(self.mesh, x_BxTxD), state


class Dense(nn.Module):
    """x W + b with weights and bias uniform(-1, 1)/sqrt(fan_in); inputs in `dtype`, output and accumulation float32."""

    features: int
    dtype: str
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fan_in = x.shape[-1]
        y = _matmul(x, self.param("kernel", _uniform(fan_in), (fan_in, self.features)), self.dtype)
        return y + self.param("bias", _uniform(fan_in), (self.features,)) if self.use_bias else y


def _uniform(fan_in: int):
    """Initialiser uniform(-1, 1)/sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / jnp.sqrt(fan_in).astype(dtype)

    return init


def _matmul(x: Array, w: Array, dtype: str) -> Array:
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=accumulator)
