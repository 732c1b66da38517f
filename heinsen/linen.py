"""The attention as a layer of Flax's Linen, for models of your own: `heinsen.linen.Attention`.

Axes: B batch, T tokens, D d_model, H heads, G heads of keys and values, K features of keys and values alike.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from heinsen.errors import InputError
from heinsen.models import ModelConfig
from heinsen.models.dense import Dense
from heinsen.models.language_model import Layer
from heinsen.models.mixers import TokenContext
from heinsen.models.state import LayerState
from heinsen.promotion import usual_promotion


class Attention(nn.Module):
    """Causal self-attention of constant cost per token, with a forget gate, a short convolution and an output gate.

        q, k, v = split(convolve(W1 x));  y = 2 sigmoid(Wg x) attention(q, k, v);  Wout y

    It is the attention of a layer of the models here, without LayerNorm and residual: put them around it. Queries and
    keys are exponents, and the gate and the convolution tell near from far: it needs no positions.

    Attributes:
      d_model: features of inputs and outputs.
      n_heads: heads of queries.
      n_kv_heads: heads of keys and values, each read by n_heads / n_kv_heads heads of queries (None: n_heads).
      d_head: features of a head (None: d_model / n_heads).
      value_domain: "log" for `heinsen.log_attention`, as in the paper, or "real" for `heinsen.attention`.
      forget_gate: whether each token multiplies what is in memory by a number from 0 to 1, one per head of queries.
      forget_gate_shortest, forget_gate_longest: the heads' time constants at the start, in tokens, are spread between
        these.
      convolution: taps of the convolution of queries, keys and values, from 2 on; 0: none.
      output_gate: whether the attention's output is multiplied by 2 sigmoid(Wg x).
      dtype: of matrix products and outputs, "float32" or "bfloat16". Parameters and states are float32.

    Raises ValueError for impossible values.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int | None = None
    d_head: int | None = None
    value_domain: str = "log"
    forget_gate: bool = True
    forget_gate_shortest: float = 2.0
    forget_gate_longest: float = 4096.0
    convolution: int = 4
    output_gate: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "n_kv_heads", "d_head", "convolution"):
            is_free = name in ("n_kv_heads", "d_head")
            if type(size := getattr(self, name)) is not int and not (size is None and is_free):
                raise InputError(f"{name} = {size!r}: expected an integer{' or None' * is_free}")
        for name in ("forget_gate", "output_gate"):
            if type(value := getattr(self, name)) is not bool:
                raise InputError(f"{name} = {value!r}: expected True or False")
        if self.d_head is None and (self.n_heads < 1 or self.d_model % self.n_heads):
            raise InputError(
                f"d_model = {self.d_model} does not divide into n_heads = {self.n_heads}: give d_head, too"
            )
        if self.n_kv_heads is not None and (self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads):
            raise InputError(f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}")
        self._config()
        super().__post_init__()

    def _config(self) -> ModelConfig:
        """A model with this attention. Raises ValueError."""
        d_head = self.d_model // self.n_heads if self.d_head is None else self.d_head
        return ModelConfig(
            vocab_size=1,
            padded_vocab_size=1,
            n_layers=1,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_key=d_head,
            d_value=d_head,
            attention="heinsen",
            sigmoid_alpha=1.0,
            sigmoid_bias="0.0",
            value_domain=self.value_domain,
            convolution=self.convolution,
            forget_gate="head" if self.forget_gate else "none",
            forget_gate_shortest=self.forget_gate_shortest,
            forget_gate_longest=self.forget_gate_longest,
            output_gate=self.output_gate,
            block="heinsen",
            position="none",
            n_positions=None,
            objective="next_token",
            dtype=self.dtype,
            remat="none",
            implementation=None,
            document_token=None,
        )

    @property
    def _n_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def setup(self) -> None:
        config = self._config()
        self.layer = _AttentionLayer(config, config.mixers[0], n_kv_heads=self._n_kv_heads)
        nn.share_scope(self, self.layer)

    @usual_promotion
    def __call__(self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """Return the output for each token, from it and those before it.

        segment_ids: tokens see each other within a run of equal ids, such as those of one document (None: all).

        Raises ValueError for arrays of other shapes.
        """
        y, _ = self.layer(x, LayerState(None, None), self._locate(x, segment_ids=segment_ids), False)
        return y

    @usual_promotion
    def read(
        self, x: Float[Array, "B T D"], state: LayerState | None = None, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T D"], LayerState]:
        """Return the output for tokens that follow `state`, one or many, and the state after them.

        The size of a state does not depend on the number of tokens. A text read in pieces has the outputs that it has
        as a whole.

        Args:
          state: from an earlier call (None: nothing came before).
          lengths: number of tokens of each row, if rows are padded at their end, where outputs mean nothing (None: T).

        Raises ValueError for arrays of other shapes, and for a state of another layer.
        """
        wanted = jax.eval_shape(lambda: self.init_state(x.shape[0]))
        if state is None:
            state = LayerState(None, None)
        elif _describe(state) != _describe(wanted):
            shapes = jax.tree.map(lambda x: x.shape, wanted)
            raise InputError(f"state does not fit this layer and x {list(x.shape)}: expected arrays of shapes {shapes}")
        return self.layer(x, state, self._locate(x, lengths=lengths), True)

    def init_state(self, batch_size: int) -> LayerState:
        """Return the state before any token: arrays with a leading axis of batch_size."""
        c, n_kv_heads = self._config(), self._n_kv_heads
        shape = batch_size, n_kv_heads, c.convolution - 1, c.n_heads // n_kv_heads * c.d_key + c.d_key + c.d_value
        inputs = jnp.zeros(shape, c.accumulator_dtype) if c.convolution else None
        return LayerState(c.mixers[0].init_state(batch_size, 0), inputs)

    def _locate(self, x: Array, segment_ids: Array | None = None, lengths: Array | None = None) -> TokenContext:
        if x.ndim != 3 or not x.shape[1] or x.shape[2] != self.d_model:
            raise InputError(f"x is {list(x.shape)}: expected [B, T, d_model = {self.d_model}] with T > 0")
        for name, array, shape in (("segment_ids", segment_ids, x.shape[:2]), ("lengths", lengths, x.shape[:1])):
            if array is not None and array.shape != shape:
                raise InputError(f"{name} is {list(array.shape)}: expected {list(shape)}")
        slot = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        valid = None if lengths is None else slot < lengths[:, None]
        start = jnp.full_like(slot, -self.convolution)  # far enough for the convolution to see all inputs of a state
        if segment_ids is None:
            return TokenContext(slot, start, valid, None)
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)])
        return TokenContext(slot, jax.lax.cummax(jnp.where(begins, slot, start), axis=1), valid, segment_ids[:, None])


def _describe(state: object) -> tuple[object, list[tuple[int, ...]]]:
    """What two states of a layer have in common."""
    return jax.tree.structure(state), [jnp.shape(x) for x in jax.tree.leaves(state)]


class _AttentionLayer(Layer):
    """The layer of the models without LayerNorm and residual, with G = n_kv_heads heads of keys and values.

    W1 makes G times the queries of H / G heads, one key and one value; with G = H it is the models' own.
    """

    n_kv_heads: int = 1

    def normalize(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """x, which is normalized already."""
        return x

    def project(
        self, normed: Float[Array, "B T D"], inputs: Array | None, context: TokenContext
    ) -> tuple[Array, Array, Array, Array | None]:
        c, n_kv_heads = self.config, self.n_kv_heads
        n_batch, n_tokens, _ = normed.shape
        n_queries = c.n_heads // n_kv_heads * c.d_key
        sizes = n_queries, c.d_key, c.d_value
        (q, k, values), inputs = self.project_heads(n_kv_heads, sizes, normed, inputs, context)
        q = q.reshape(n_batch, n_kv_heads, n_tokens, -1, c.d_key).swapaxes(2, 3).reshape(n_batch, -1, n_tokens, c.d_key)
        k, values = (jnp.repeat(each, c.n_heads // n_kv_heads, axis=1) for each in (k, values))
        return q, k, values, inputs

    def add_to_residual(self, x: Float[Array, "B T D"], y: Array) -> Float[Array, "B T D"]:
        """Wout y."""
        return Dense(self.config.d_model, self.config.dtype, init_std=self.init_std, name="out")(y)
