"""The paper's language model, exactly as published (`configs/pile_125m.py`), and GPT-2's block in the same frame.

    x = embed(tokens);  x = x + position(x);  24 times  x = x + W3 GLU(W2 log_attention(W1 LayerNorm(x)))
    logits = LayerNorm(x) embed^T

There is no MLP block, no dropout and no 1/sqrt(d): queries and keys are exponents, and the layer goes on with the
logarithm of the attention. Products, queries, keys, values, y and the residual stream have `ModelConfig.dtype`, with
float32 accumulators; sums, scans and logarithms are float32 (docs/training.md#precision).

`ModelConfig` exchanges the parts: the attention of all layers or of a pattern (`heinsen.models.mixers`), the positions
(`heinsen.models.positions`), the block around the attention (`LAYERS`), and the objective.

Layers are stacked and scanned to train and to read prompts. To decode, where reading the parameters is most of the
work, `forward` with parameters from `unstack` runs them one by one, without slicing them out of the stack.

Axes: B batch, T tokens, D d_model, H heads, K key features, V value features, L layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from heinsen.models.config import REMAT_POLICIES, ModelConfig, check_causal
from heinsen.models.convolution import Convolution
from heinsen.models.cross_entropy import token_logits
from heinsen.models.dense import Dense, HeadsDense, matmul, weight_init
from heinsen.models.feature_map import FeatureMap
from heinsen.models.gate import ForgetGate
from heinsen.models.mixers import Mixer, TokenContext
from heinsen.models.mixers.base import hide_padding
from heinsen.models.positions import POSITION_CLASSES
from heinsen.models.state import LayerState, ModelState, locate_tokens, state_after
from heinsen.ops.arrays import ATTENTION
from heinsen.parallel import BATCH, constrain
from heinsen.promotion import usual_promotion

Params = dict[str, Any]

_RECORDS = "records"  # the collection of variables in which layers record what is asked for


class LanguageModel(nn.Module):
    """Embedding, positions and layers; the embedding also makes the logits of the output.

    A mesh divides the batch over data x fsdp, tokens over sequence, and heads over tensor (`heinsen.parallel`).
    `stacked` says whether the layers' parameters are stacked, as those of `init_params` are. With a `teacher`, a model
    with other attention and otherwise the same parameters, layers go on with its attention (`attention_distances`).
    """

    config: ModelConfig
    mesh: Mesh | None = None
    stacked: bool = True
    teacher: ModelConfig | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: ModelState | None = None,
        lengths: Int[Array, " B"] | None = None,
        keep_state: bool = True,
        first_place: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], ModelState | None]:
        """Return the last hidden states, of which the embedding makes logits, and the state after all tokens.

        first_place: place of each row's first token in its document (None: as the state says, 0 without one).
        """
        c = self.config
        keep_state = keep_state and c.causal
        init_std = LAYERS[c.block].init_std
        embedding = self.param("embedding", weight_init(c.d_model, init_std), (c.padded_vocab_size, c.d_model))
        x = jnp.take(embedding, tokens, axis=0)

        before, context = locate_tokens(c, tokens, state, lengths, first_place)
        x = constrain_stream(self.mesh, x)
        add_position = POSITION_CLASSES[c.position](c, self.mesh, init_std, name="position")
        x, position = add_position(x, before.position, context)
        x = x.astype(c.dtype)
        states = tuple(map(LayerState, before.attention, before.convolution))
        if self.stacked:
            x, states = self._scan_layers(x, states, context, keep_state)
        else:
            x, states = run_layers(c, c.layer_mixers, self.mesh, x, states, context, keep_state)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        after = state_after(before, context, lengths, position, states) if keep_state else None
        return x, after

    def _scan_layers(
        self, x: Float[Array, "B T D"], states: tuple[LayerState, ...], context: TokenContext, keep_state: bool
    ) -> tuple[Float[Array, "B T D"], tuple[LayerState, ...]]:
        """Scan over repetitions of the pattern, with the states of each layer of the pattern stacked."""
        c, period = self.config, len(self.config.mixers)
        module, arguments = (LAYERS[c.block], (c, c.mixers[0])) if period == 1 else (Period, (c,))
        if c.remat != "none":
            module = nn.remat(module, prevent_cse=False, policy=REMAT_POLICIES[c.remat], static_argnums=(4,))
        scan: Any = nn.scan(
            module,
            variable_axes={"params": 0, _RECORDS: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            out_axes=0,
            length=c.n_layers // period,
        )
        stacks = tuple(jax.tree.map(lambda *x: jnp.stack(x), *states[j::period]) for j in range(period))
        options = {} if self.teacher is None else {"teacher": self.teacher}
        run = scan(*arguments, self.mesh, **options, name="layers")
        x, after = run(x, stacks if period > 1 else stacks[0], context, keep_state)
        stacks = after if period > 1 else (after,)
        return x, tuple(jax.tree.map(lambda x, i=i: x[i // period], stacks[i % period]) for i in range(c.n_layers))


class Period(nn.Module):
    """The layers of one repetition of the config's pattern, where that is longer than one layer."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], states: tuple[LayerState, ...], context: TokenContext, keep_state: bool
    ) -> tuple[Float[Array, "B T D"], tuple[LayerState, ...]]:
        c = self.config
        return run_layers(c, c.mixers, self.mesh, x, states, context, keep_state)


def run_layers(
    config: ModelConfig,
    mixers: tuple[Mixer[Any], ...],
    mesh: Mesh | None,
    x: Float[Array, "B T D"],
    states: tuple[LayerState, ...],
    context: TokenContext,
    keep_state: bool,
) -> tuple[Float[Array, "B T D"], tuple[LayerState, ...]]:
    """Run one layer for each mixer, in order, as submodules layer_0, layer_1, ... of the module that calls this."""
    after = []
    for i, (mixer, state) in enumerate(zip(mixers, states, strict=True)):
        layer = LAYERS[config.block](config, mixer, mesh, name=f"layer_{i}")
        x, state = layer(x, state, context, keep_state)
        after.append(state)
    return x, tuple(after)


# ---- layers --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The paper's layer: x + W3 GLU(W2 attend(q, k, v)), with (q, k, v) = W1 LayerNorm(x) split head by head.

    Shapes: x [B, T, D], W1 [D, H (2K + V)], W2 [H V, 2D], W3 [D, D]. The paper's attention takes log v for v, and
    returns the logarithm of its output. A short convolution, if the config has one, follows W1, then rotations, then a
    feature map. With an output gate W2 reads attend(...) times 2 sigmoid(Wg LayerNorm(x)), Wg [D, H V].
    """

    config: ModelConfig
    mixer: Mixer[Any]
    mesh: Mesh | None = None
    teacher: ModelConfig | None = None  # see `LanguageModel`

    init_std: ClassVar[float | None] = None  # of initial weights: see `weight_init`

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], state: LayerState, context: TokenContext, keep_state: bool
    ) -> tuple[Float[Array, "B T D"], LayerState]:
        """Return x after the layer, and the state after the last token if it is to be kept, else an empty one."""
        normed = self.normalize(x).astype(self.config.dtype)
        q, k, values, inputs = self.project(normed, state.convolution, context)
        context = self.add_log_decays(normed, context)
        context = self.add_beta(normed, context)
        exponents = self.map_features(q, k)
        y, mixer_state = self.attend(*exponents, values, state, context)
        if self.teacher is not None:
            y = self.follow_teacher(y, q, k, values, context)
        y = self.merge_heads(y, normed)
        self.record("attention", lambda: self.rms(y))
        x = self.add_to_residual(x, y)
        self.record("residual", lambda: self.rms(x))
        after = LayerState(mixer_state, inputs) if keep_state else LayerState(None, None)
        return constrain_stream(self.mesh, x), after

    def normalize(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """LayerNorm(x), of which all of the attention is made."""
        return nn.LayerNorm(epsilon=1e-5, name="norm")(x)

    def project(
        self, normed: Float[Array, "B T D"], inputs: Array | None, context: TokenContext
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys [B, H, T, K] and values [B, H, T, V], and the last inputs of the convolution after `inputs`."""
        c = self.config
        sizes = c.d_key, c.d_key, c.d_value
        (q, k, values), inputs = self.project_heads(c.n_heads, sizes, normed, inputs, context)
        if self.mixer.uses_rotary:
            q, k = POSITION_CLASSES[c.position].rotate(q, k, context)
        return q, k, values, inputs

    def project_heads(
        self,
        n_heads: int,
        sizes: tuple[int, ...],
        normed: Float[Array, "B T D"],
        inputs: Array | None,
        context: TokenContext,
    ) -> tuple[list[Array], Array | None]:
        """W1 LayerNorm(x) of each head after the convolution, in parts [B, H, T, size], and the last inputs of that."""
        c = self.config
        parts = HeadsDense(n_heads, sizes, c.dtype, self.init_std, name="w1")(normed)
        if not c.convolution:
            return parts, inputs
        return Convolution(c.convolution, self.mesh, name="convolution")(parts, inputs, context)

    def map_features(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys as the mixer takes them: exponents [B, H, T, F], if there is a feature map."""
        c = self.config
        if c.n_features is None or not self.mixer.takes_exponents:
            return q, k
        return FeatureMap(c.feature_map, c.n_features, c.dtype, name="feature_map")(q, k)

    def attend(self, q: Array, k: Array, values: Array, state: LayerState, context: TokenContext) -> tuple[Array, Any]:
        """The attention [B, H, T, V] of all heads, and the mixer's state after the last token."""
        if self.mixer.takes_log_decay and self.config.causal and not self.mixer.has_cache:
            k, context = hide_padding(k, context)
        is_step = state.attention is not None and context.slot.shape[1] == 1
        attend = self.mixer.step if is_step else self.mixer.attend
        y, after = attend(q, k, values, state.attention, context, self.mesh)
        return checkpoint_name(y.astype(self.config.dtype), ATTENTION), after

    def follow_teacher(self, y: Array, q: Array, k: Array, values: Array, context: TokenContext) -> Array:
        """The teacher's attention of the same queries, keys and values; records the distance of y from it."""
        assert self.teacher is not None
        if self.teacher.forget_gate == "none":
            context = context._replace(log_decay=None)
        if self.teacher.position != self.config.position:
            q, k = POSITION_CLASSES[self.teacher.position].rotate(q, k, context)
        target, _ = self.teacher.mixers[0].attend(q, k, values, None, context, self.mesh)

        def measure() -> Array:
            ours, theirs = (x.astype(self.config.accumulator_dtype) for x in (y, target))
            return jnp.mean(jnp.square(ours - theirs)) / jnp.mean(jnp.var(theirs, axis=(0, 2)))

        self.record("distance", measure)
        return target

    def add_log_decays(self, normed: Float[Array, "B T D"], context: TokenContext) -> TokenContext:
        """The context with the log decays of the forget gate, if the layer has one; one for each direction it sees."""
        c = self.config
        if c.forget_gate == "none" or not self.mixer.takes_log_decay:
            return context
        gate = partial(ForgetGate, c.n_heads, c.forget_gate_shortest, c.forget_gate_longest, c.dtype, self.init_std)
        before = gate(name="gate")(normed)
        after = None if c.causal else gate(name="gate_after")(normed)
        decays = before if after is None else jnp.concatenate([before, after], axis=1)
        self.record("decay", lambda: jnp.mean(jnp.exp(decays), axis=(0, 2)))
        return context._replace(log_decay=before, log_decay_after=after)

    def add_beta(self, normed: Float[Array, "B T D"], context: TokenContext) -> TokenContext:
        """The context with beta = sigmoid(W LayerNorm(x) + b), one number per head, if the mixer takes it."""
        if not self.mixer.takes_beta:
            return context
        c = self.config
        beta = Dense(c.n_heads, c.dtype, init_std=self.init_std, rounded=False, name="strength")(normed)
        return context._replace(beta=nn.sigmoid(beta).swapaxes(1, 2))

    def merge_heads(self, y: Float[Array, "B H T V"], normed: Float[Array, "B T D"]) -> Array:
        """The attention of all heads side by side [B, T, H V], times the output gate if there is one."""
        y = y.swapaxes(1, 2).reshape(*normed.shape[:2], -1)
        if not self.config.output_gate:
            return y
        gate = Dense(y.shape[-1], self.config.dtype, init_std=self.init_std, name="output_gate")(normed)
        return y * (2 * nn.sigmoid(gate))

    def add_to_residual(self, x: Float[Array, "B T D"], y: Array) -> Float[Array, "B T D"]:
        """x + W3 GLU(W2 y)."""
        c = self.config
        h = nn.glu(Dense(2 * c.d_model, c.dtype, name="w2")(y))
        return x + Dense(c.d_model, c.dtype, use_bias=False, name="w3")(h)

    def record(self, name: str, compute: Callable[[], Array]) -> None:
        """Record a value where `layer_records` asks for it."""
        if self.is_mutable_collection(_RECORDS) and not self.is_initializing():
            self.sow(_RECORDS, name, compute(), reduce_fn=lambda _, new: new, init_fn=lambda: None)

    def rms(self, x: Array) -> Array:
        """Root mean square of x."""
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(self.config.accumulator_dtype))))


class GPT2Layer(Layer):
    """GPT-2's layer: x = x + Wo attend(split(W1 LayerNorm(x)));  x + Wout gelu(Win LayerNorm(x)).

    Shapes: Wo [H V, D], Win [D, 4D], Wout [4D, D]. Weights start normal; those of the 2 L matrices whose output is
    added to the residual stream have a standard deviation smaller by 1/sqrt(2 L).
    """

    init_std: ClassVar[float | None] = 0.02

    def add_to_residual(self, x: Float[Array, "B T D"], y: Array) -> Float[Array, "B T D"]:
        """x' = x + Wo y;  x' + Wout gelu(Win LayerNorm(x'))."""
        c = self.config
        residual_std = 0.02 / math.sqrt(2 * c.n_layers)
        x = x + Dense(c.d_model, c.dtype, init_std=residual_std, name="attention_out")(y)
        h = nn.LayerNorm(epsilon=1e-5, name="mlp_norm")(constrain_stream(self.mesh, x))
        h = Dense(4 * c.d_model, c.dtype, init_std=0.02, name="mlp_in")(h.astype(c.dtype))
        h = nn.gelu(h, approximate=True)
        return x + Dense(c.d_model, c.dtype, init_std=residual_std, name="mlp_out")(h)


LAYERS: dict[str, type[Layer]] = {"heinsen": Layer, "gpt2": GPT2Layer}  # the names in heinsen.models.config.BLOCKS


def constrain_stream(mesh: Mesh | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Divide the residual stream over the mesh by batch and tokens alone."""
    return constrain(mesh, x, BATCH, "sequence", None)


# ---- parameters ----------------------------------------------------------------------------------


@usual_promotion
@partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: Array) -> Params:
    """Draw float32 parameters, in nested dicts; those of the layers are stacked along a leading axis. Jitted.

    For a pattern of P > 1 layers, `params["layers"]["layer_0"]` to `["layer_{P-1}"]` each hold L / P layers.
    """
    return LanguageModel(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def abstract_params(config: ModelConfig) -> Params:
    """Return the shapes and dtypes of `init_params`, without the numbers."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def unstack(config: ModelConfig, params: Params, donate: bool = False) -> Params:
    """Return the parameters with an entry for each layer, for `forward` to run the layers one by one.

    donate: delete each array of the stack once its layers are copied, so that memory holds only one of them twice.
    """
    period = len(config.pattern)
    stacks = [params["layers"][f"layer_{j}"] for j in range(period)] if period > 1 else [params["layers"]]

    def split(stack: Array) -> list[Array]:
        layers = [stack[i] for i in range(config.n_layers // period)]
        if donate:
            jax.block_until_ready(layers)
            stack.delete()
        return layers

    is_split = lambda x: isinstance(x, list)
    split_stacks = [jax.tree.map(split, each) for each in stacks]
    by_name = {
        f"layer_{i}": jax.tree.map(lambda x, i=i: x[i // period], split_stacks[i % period], is_leaf=is_split)
        for i in range(config.n_layers)
    }
    return {name: x for name, x in params.items() if name != "layers"} | by_name


def count_params(params: Params) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# ---- the forward pass ----------------------------------------------------------------------------


@usual_promotion
def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    last_only: bool = False,
) -> tuple[Float[Array, "B T padded_vocab"] | Float[Array, "B padded_vocab"], ModelState]:
    """Return the logits of every next token, and the state after the last token.

    Args:
      params: from `init_params` or `unstack`; "head", if there, makes the logits instead of the embedding.
      state: what came before the tokens (None: nothing).
      lengths: number of tokens of each row, if rows are padded at their end (None: T).
      last_only: return only the logits of each row's last token (of its first, if the row has none).

    Logits beyond learned positions are NaN (`check_room`). Raises ValueError for masked models (see `masked_logits`).
    """
    x, after = hidden_states(config, params, tokens, state, lengths)
    if last_only:
        last = jnp.full(x.shape[0], x.shape[1] - 1) if lengths is None else jnp.maximum(lengths - 1, 0)
        return logits_of(config, params, jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]), after
    return token_logits(x, _head(params), config.dtype), after


@usual_promotion
def logits_of(config: ModelConfig, params: Params, x: Float[Array, "B D"]) -> Float[Array, "B padded_vocab"]:
    """Return the logits for hidden states of one token per sequence."""
    # The embedding first: XLA's CPU library is up to twice as fast so.
    return matmul(_head(params), x.T, config.dtype).T


def _head(params: Params) -> Array | np.ndarray:
    return params["head"] if "head" in params else params["embedding"]


@usual_promotion
def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], ModelState]:
    """Return what `forward` multiplies with the embedding, and the state; arguments and errors as there."""
    check_causal(config)
    model = LanguageModel(config, stacked="layers" in params)
    lengths = None if lengths is None else jnp.asarray(lengths)
    result: Any = model.apply({"params": params}, jnp.asarray(tokens), state, lengths)
    return result


@usual_promotion
def layer_records(
    config: ModelConfig, params: Params, tokens: Int[Array | np.ndarray, "B T"], mesh: Mesh | None = None
) -> dict[str, dict[int, Array]]:
    """Return {name: {number of a layer: its value}}, in the order of the layers, from one forward pass.

    "attention" and "residual" are root mean squares: of the attention's output as W2 reads it, and of the stream after
    the layer. "decay" [n_gates], of layers with a forget gate, is what a token leaves of the weights before it, the
    mean of each head. After n tokens with independent gates decay^n is expected to be left. Masked models have 2H: the
    gates for earlier tokens, then those for later ones. `params` are stacked, as from `init_params`.
    """
    model = LanguageModel(config, mesh)
    variables: Any = model.apply({"params": params}, jnp.asarray(tokens), keep_state=False, mutable=[_RECORDS])[1]
    period, layers = len(config.pattern), variables[_RECORDS]["layers"]
    stacks = [layers] if period == 1 else [layers[f"layer_{j}"] for j in range(period)]
    records: dict[str, dict[int, Array]] = {"attention": {}, "residual": {}, "decay": {}}
    for layer in range(config.n_layers):
        for name, values in stacks[layer % period].items():
            records[name][layer] = values[layer // period]
    return records


@usual_promotion
def attention_distances(
    config: ModelConfig,
    teacher: ModelConfig,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    mesh: Mesh | None = None,
    first_place: Int[Array | np.ndarray, " B"] | None = None,
) -> Float[Array, " L"]:
    """Return how far each layer's attention is from a teacher's of the same inputs, those of the teacher.

    It is the mean squared error of all heads' outputs over the variance of the teacher's. Both models read `params`,
    those of `config`, stacked; the teacher has another kind of attention, no feature map, and maybe rotations where
    `config` has none. The kind of attention is the same in all layers.
    """
    model = LanguageModel(config, mesh, teacher=teacher)
    first_place = None if first_place is None else jnp.asarray(first_place)
    inputs = jnp.asarray(tokens), None, None, False, first_place
    variables: Any = model.apply({"params": params}, *inputs, mutable=[_RECORDS])[1]
    distances: Array = variables[_RECORDS]["layers"]["distance"]
    return distances
