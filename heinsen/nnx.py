"""The attention as a layer of Flax's NNX, for models of your own: `heinsen.nnx.Attention`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from heinsen import linen
from heinsen.models.state import LayerState


class Attention(nnx.Module):
    """`heinsen.linen.Attention` as a module of NNX, with the same arguments and the same parameters.

    Its attributes are groups of parameters, such as w1.kernel. `rngs` draws them, from its stream "params".
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        value_domain: str = "log",
        forget_gate: bool = True,
        forget_gate_shortest: float = 2.0,
        forget_gate_longest: float = 4096.0,
        convolution: int = 4,
        output_gate: bool = True,
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.module = linen.Attention(
            d_model,
            n_heads,
            n_kv_heads,
            d_head,
            value_domain,
            forget_gate,
            forget_gate_shortest,
            forget_gate_longest,
            convolution,
            output_gate,
            dtype,
            parent=None,
        )
        for name, group in _draw_params(self.module, rngs.params()).items():
            setattr(self, name, nnx.Dict({key: nnx.Param(x) for key, x in group.items()}))

    def __call__(self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """As `heinsen.linen.Attention.__call__`."""
        y: Any = self.module.apply(self._variables(), x, segment_ids)
        return y

    def read(
        self, x: Float[Array, "B T D"], state: LayerState | None = None, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T D"], LayerState]:
        """As `heinsen.linen.Attention.read`."""
        result: Any = self.module.apply(self._variables(), x, state, lengths, method="read")
        return result

    def init_state(self, batch_size: int) -> LayerState:
        """As `heinsen.linen.Attention.init_state`."""
        return self.module.init_state(batch_size)

    def _variables(self) -> dict[str, Any]:
        return {"params": nnx.to_pure_dict(nnx.state(self, nnx.Param))}


@partial(jax.jit, static_argnums=0)
def _draw_params(module: linen.Attention, key: Array) -> dict[str, dict[str, Array]]:
    return module.init(key, jnp.zeros((1, 1, module.d_model)))["params"]
