"""Language models: the paper's, exactly as published (`configs/pile_125m.py`), and its variants. The only Flax import.

    x = embed(tokens);  x = x + position(x);  24 times  x = x + W3 GLU(W2 log_attention(W1 LayerNorm(x)))
    logits = LayerNorm(x) embed^T

No MLP block, no dropout, no 1/sqrt(d): queries and keys are exponents, and the layer goes on with the logarithm of the
attention. The residual stream, logarithms and scans are float32; matmul inputs are `ModelConfig.dtype`, their
accumulators float32.

Layers are stacked and scanned, in training and to read prompts; `forward` with parameters from `unstack` runs them one
by one, without slicing them out of the stack: to decode, where reading the parameters is most of the work.

Axes: B batch, T tokens, D d_model, H heads, K key features, V value features, L layers.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.attention import IMPLEMENTATIONS, LogState, init_state, running, sharded, softmax
from heinsen.attention.running import RunningState
from heinsen.attention.softmax import KVCache
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

ATTENTION_KINDS = ("heinsen", "softmax")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `configs/default.py` holds the paper's.

    vocab_size counts the tokenizer's ids; the embedding and the softmax have padded_vocab_size rows. attention is the
    kind of all layers, or a pattern that repeats, such as heinsen*3,softmax. dtype is that of matmul inputs. remat
    names what the backward pass computes again (REMAT_POLICIES). implementation is log_attention's (None: the best).
    document_token is the id that begins a document, with which the model forgets all before; None: it never does.
    """

    vocab_size: int
    padded_vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    d_key: int
    d_value: int
    attention: str
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
        if self.n_layers % len(self.pattern):
            raise ValueError(
                f"model.attention = {self.attention!r} is a pattern of {len(self.pattern)} layers, which does not "
                f"divide model.n_layers = {self.n_layers}"
            )
        if "softmax" in self.pattern and self.d_key != self.d_value:
            raise ValueError(
                f"softmax attention needs model.d_key = {self.d_key} and model.d_value = {self.d_value} to be equal"
            )

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
        return "softmax" in self.pattern


LayerState = LogState | RunningState | KVCache


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

    Caches have room for `capacity` tokens (`with_capacity` gives them more).
    """

    def layer_state(kind):
        if kind == "heinsen":
            return init_state((batch_size, config.n_heads), config.d_key, config.d_value, dtype=_accumulator(config))
        return softmax.init_cache(batch_size, config.n_heads, capacity, config.d_key, config.d_value, config.dtype)

    return ModelState(
        jnp.zeros((batch_size, config.d_model), _accumulator(config)),
        tuple(layer_state(config.kind(i)) for i in range(config.n_layers)),
        jnp.zeros(batch_size, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
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
            new = running.begin_steps(new)._replace(smallest=old.smallest)
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
    """What `forward` makes its logits of, by a product with the embedding; arguments and state as there."""
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
    """The mean of the next tokens' losses, by their weights (None: equal), to be differentiated: see `heinsen.loss`."""
    tokens = jnp.asarray(tokens)
    x_BxTxD, embedding, _ = _hidden(config, params, tokens[:, :-1], mesh)
    targets_BxT = tokens[:, 1:]
    if weights is None:
        weights_BxT = jnp.full(targets_BxT.shape, 1 / targets_BxT.size, x_BxTxD.dtype)
    else:
        weights_BxT = (weights / jnp.sum(weights)).astype(x_BxTxD.dtype)
    return weighted_loss(x_BxTxD, embedding, targets_BxT, weights_BxT, config.dtype, mesh)


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
        embedding = self.param("embedding", _uniform(c.d_model), (c.padded_vocab_size, c.d_model))
        x_BxTxD = jnp.take(embedding, tokens_BxT, axis=0)
        begins_BxT = None if c.document_token is None else tokens_BxT == c.document_token
        # No attention states, rather than empty ones: those would exist for all layers at once.
        before = init_model_state(c, n_batch)._replace(attention=(None,) * c.n_layers) if state is None else state
        if begins_BxT is not None and state is not None:
            before = _forget_where_it_begins(c, before, begins_BxT[:, 0], n_tokens)
        tokens = _tokens(before, n_tokens, lengths_B, begins_BxT)
        x_BxTxD = _of_tokens(self.mesh, x_BxTxD)
        position_BxTxD = Position(c, self.mesh, name="position")(x_BxTxD, before.position, begins_BxT, tokens.valid)
        x_BxTxD = x_BxTxD + position_BxTxD
        x_BxTxD, attention = self._layers(x_BxTxD, before.attention, tokens, keep_state)
        x_BxTxD = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        if not keep_state:
            return x_BxTxD, None
        n_seen = before.n_tokens + (n_tokens if lengths_B is None else lengths_B)
        start = jnp.take_along_axis(tokens.first, jnp.maximum(n_seen - before.n_tokens - 1, 0)[:, None], axis=1)[:, 0]
        return x_BxTxD, ModelState(position_BxTxD[:, -1], attention, n_seen, start)

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
            variable_axes={"params": 0},
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
    """e_t = logaddexp(e_{t-1} + log_a_t, l_t), with log_a = log_sigmoid(c) and (c, l) a dense map of the embedding."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x_BxTxD: Array, initial_BxD: Array, begins_BxT: Array | None = None, valid_BxT: Array | None = None
    ) -> Array:
        c, log_b = jnp.split(Dense(2 * self.config.d_model, self.config.dtype, name="dense")(x_BxTxD), 2, axis=-1)
        log_a = nn.log_sigmoid(c)
        if begins_BxT is not None:  # e_{t-1} is 0 there, as before any token
            begins = begins_BxT[..., None]
            log_b = jnp.where(begins, logaddexp(log_a, log_b), log_b)
            log_a = jnp.where(begins, NEG_INF, log_a)
        if valid_BxT is not None:  # what is no token changes nothing
            log_a = jnp.where(valid_BxT[..., None], log_a, 0.0)
            log_b = jnp.where(valid_BxT[..., None], log_b, NEG_INF)
        if x_BxTxD.shape[1] == 1:
            return logaddexp(initial_BxD[:, None] + log_a, log_b)
        return sharded.log_linear_recurrence(self.mesh, log_a, log_b, initial_BxD)


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

    The paper's attention takes W1's last part for logarithms of values and gives that of y.
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
        h = nn.LayerNorm(epsilon=1e-5, name="norm")(x_BxTxD)
        h = Dense(c.n_heads * (2 * c.d_key + c.d_value), c.dtype, name="w1")(h)
        h_BxHxTxC = h.reshape(n_batch, n_tokens, c.n_heads, -1).swapaxes(1, 2)
        q, k, values = jnp.split(h_BxHxTxC, (c.d_key, 2 * c.d_key), axis=-1)
        y_BxHxTxV, state = _attend(c, self.kind, self.mesh, q, k, values, state, tokens)
        y = y_BxHxTxV.swapaxes(1, 2).reshape(n_batch, n_tokens, -1)
        h = nn.glu(Dense(2 * c.d_model, c.dtype, name="w2")(y))
        x_BxTxD = x_BxTxD + Dense(c.d_model, c.dtype, use_bias=False, name="w3")(h)
        return _of_tokens(self.mesh, x_BxTxD), state if keep_state else None


def _attend(config, kind, mesh, q, k, values, state, tokens):
    """One layer's attention, causal: (log y for the paper's, else y; the state after all tokens)."""
    if kind == "heinsen":
        if tokens.valid is not None:
            k = jnp.where(tokens.valid[:, None, :, None], k, NEG_INF)
        if isinstance(state, RunningState):
            log_y, state = running.step(state, q[:, :, 0], k[:, :, 0], values[:, :, 0])
            return log_y[:, :, None], state
        return sharded.log_attention(mesh, q, k, values, state, tokens.segment_ids, config.implementation)
    q, k, values = (x.astype(config.dtype) for x in (q, k, values))
    if state is None:
        y = sharded.over_heads(mesh, softmax.softmax_attention)(q, k, values, tokens.segment_ids)
        return y, KVCache(k, values)
    cache = softmax.append(state, k, values, tokens.slot, tokens.valid)
    return softmax.attend_cached(q, cache, tokens.slot, tokens.first), cache


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
