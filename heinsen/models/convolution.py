"""The short causal convolution: each feature of a layer's queries, keys and values mixed with its last few inputs.

    y[t] = sum_{i < N} taps[i] x[t - i]     over the tokens t - i of t's document

It is depthwise: every feature has N taps of its own. Its state is the last N - 1 inputs. The taps start random, so that
y has the variance of x: where they start as the identity, a model learns far later to bring a value together with the
key before it (docs/log/2026-11.md, "taps that start random").

Axes: B batch, H heads, T tokens, F features, N taps (`ModelConfig.convolution`), I = N - 1 last inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from heinsen import backend
from heinsen.models.mixers import TokenContext
from heinsen.parallel import BATCH, MeshError, on_each_device
from heinsen.promotion import usual_promotion


class Convolution(nn.Module):
    """Convolution with n_taps random taps for each feature. A mesh divides the batch, the heads and the tokens."""

    n_taps: int
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B H T F"], before: Float[Array, "B H I F"] | None, context: TokenContext
    ) -> tuple[Float[Array, "B H T F"], Float[Array, "B H I F"]]:
        """Return (y, the last inputs), where `before` are the inputs before the first token (None: there are none)."""
        taps = self.param("taps", random_taps, (x.shape[1], self.n_taps, x.shape[-1]))
        return convolve(self.mesh, x, taps, before, context.place, context.valid)


def random_taps(key: Array, shape: tuple[int, ...]) -> Float[Array, "H N F"]:
    """Initializer of taps, uniform with variance 1/N."""
    limit = math.sqrt(3 / shape[-2])
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def identity_taps(shape: tuple[int, ...]) -> Float[Array, "*stack N F"]:
    """Taps with which y = x."""
    return jnp.zeros(shape).at[..., 0, :].set(1.0)


def convolve(
    mesh: Mesh | None,
    x: Float[Array, "B H T F"],
    taps: Float[Array, "H N F"],
    before: Float[Array, "B H I F"] | None,
    places: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B H T F"], Float[Array, "B H I F"]]:
    """Return (y, the last N - 1 inputs), where inputs in `before` are seen as far as a token's document reaches there.

    Args:
      before: the last inputs before the tokens (None: there are none).
      places: of the tokens in their documents, from 0.
      valid: false for padding at a row's end, which is never among the last inputs. A mesh that divides sequences needs
        whole ones (None).

    Raises MeshError where the mesh divides sequences into parts of fewer than N - 1 tokens.
    """
    n_heads, n_taps, n_features = taps.shape
    if before is None:
        before = jnp.zeros((x.shape[0], n_heads, n_taps - 1, n_features), x.dtype)
    if mesh is None or mesh.size == 1:
        return _convolve(x, taps, before, places, valid)

    def on_each(x: Array, taps: Array, before: Array, places: Array, valid: Array | None) -> tuple[Array, Array]:
        if (n_devices := mesh.shape["sequence"]) > 1:
            received = lax.ppermute(x[:, :, 1 - n_taps :], "sequence", [(i, i + 1) for i in range(n_devices - 1)])
            before = jnp.where(lax.axis_index("sequence") == 0, before, received)
        y, last = _convolve(x, taps, before, places, valid)
        return y, last[None]

    check_halo(mesh, x.shape[2], n_taps)
    inputs, tokens = P(BATCH, "tensor", "sequence"), P(BATCH, "sequence")
    in_specs = (inputs, P("tensor"), P(BATCH, "tensor"), tokens, tokens)
    out_specs = (inputs, P("sequence", BATCH, "tensor"))
    y, last = on_each_device(mesh, on_each, in_specs=in_specs, out_specs=out_specs)(x, taps, before, places, valid)
    return y, last[-1]


def check_halo(mesh: Mesh, n_tokens: int, n_taps: int) -> None:
    """Raise MeshError where a device's part of a sequence has less than the inputs that the next one's first sees."""
    n_parts = mesh.shape["sequence"]
    if n_parts > 1 and n_tokens // n_parts < n_taps - 1:
        raise MeshError(
            f"mesh.sequence = {n_parts} divides {n_tokens} tokens into parts of {n_tokens // n_parts}, but "
            f"model.convolution = {n_taps} needs parts of at least {n_taps - 1}: use the mesh's other axes"
        )


def _convolve(x: Array, taps: Array, before: Array, places: Array, valid: Array | None) -> tuple[Array, Array]:
    n_inputs, n_tokens = taps.shape[1] - 1, x.shape[2]
    # The barriers keep XLA from mixing the inputs again wherever it reads an output, and from the same backward.
    x = lax.optimization_barrier(jnp.concatenate([before, x], axis=2))
    y = lax.optimization_barrier(_mix(x, taps, places))
    if valid is None:
        return y, x[:, :, n_tokens:]
    last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(n_inputs)
    return y, jnp.take_along_axis(x, last[:, None, :, None], axis=2)


@jax.custom_vjp
def _mix(x: Array, taps: Float[Array, "H N F"], places: Int[Array, "B T"]) -> Float[Array, "B H T F"]:
    """y of inputs x [B, H, I + T, F] from before the tokens on. JAX would save them for each tap."""
    return _over_rows(lambda x, places: _mix_row(x, taps, places), x, places)


@usual_promotion
def _mix_forward(x: Array, taps: Array, places: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _mix(x, taps, places), (x, taps, places)


@usual_promotion
def _mix_backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, taps, places = saved
    dx, dtaps = _over_rows(lambda x, dy, places: _mix_row_backward(x, taps, dy, places), x, dy, places)
    return dx, jnp.sum(dtaps, axis=0), None


_mix.defvjp(_mix_forward, _mix_backward)


def _over_rows(function: Callable[..., Any], *arrays: Array) -> Any:
    """`jax.vmap(function)`. On CPUs one row after the other: XLA drops the barriers there, but fuses no loops."""
    if backend.current() != "cpu" or arrays[-1].shape[1] == 1:
        return jax.vmap(function)(*arrays)
    return lax.map(lambda row: function(*row), arrays)


def _mix_row(x: Array, taps: Float[Array, "H N F"], places: Int[Array, " T"]) -> Float[Array, "H T F"]:
    y = taps[:, :1] * x[:, taps.shape[1] - 1 :]
    for i in range(1, taps.shape[1]):
        y = y + taps[:, i : i + 1] * jnp.where(_seen(i, places), _inputs(x, i, places), 0)
    return y


def _mix_row_backward(
    x: Array, taps: Float[Array, "H N F"], dy: Float[Array, "H T F"], places: Int[Array, " T"]
) -> tuple[Array, Array]:
    n_taps = taps.shape[1]
    padded = jnp.pad(dy, [(0, 0), (n_taps - 1, n_taps - 1), (0, 0)])
    padded_places = jnp.pad(places, n_taps - 1)
    dx, dtaps = jnp.zeros_like(x), []
    for i in range(n_taps):
        later = slice(i, i + x.shape[1])  # the outputs that read each input by tap i
        dx = dx + taps[:, i : i + 1] * jnp.where(_seen(i, padded_places[later]), padded[:, later], 0)
        dtaps.append(_sum_tokens(jnp.where(_seen(i, places), dy, 0) * _inputs(x, i, places)))
    return dx, jnp.stack(dtaps, axis=1)


def _inputs(x: Array, i: int, places: Int[Array, " T"]) -> Float[Array, "H T F"]:
    """The inputs that come i before each token, whatever their documents."""
    end = x.shape[1] - i
    return x[:, end - len(places) : end]


def _seen(i: int, places: Int[Array, " T"]) -> Bool[Array, "T 1"]:
    """Whether the input i before a token is of its document."""
    return (places >= i)[:, None]


def _sum_tokens(x: Float[Array, "H T F"]) -> Float[Array, "H F"]:
    """Sum over tokens, by halves: XLA's CPU backend is many times slower at its own sum of a product."""
    while x.shape[1] > 8:
        x = jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), (0, 0)])
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return jnp.sum(x, axis=1)
