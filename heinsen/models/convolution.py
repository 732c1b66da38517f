"""The short causal convolution: each feature of a layer's queries, keys and values mixed with its last few inputs.

    y[t] = sum_{i < N} taps[i] x[t - i]     over the tokens t - i of t's document

It is depthwise: every feature has N taps of its own. Its state is the last N - 1 inputs. The taps start random, so that
y has the variance of x: where they start as the identity, a model learns far later to bring a value together with the
key before it (docs/log/2026-11.md, "taps that start random").

Axes: B batch, H heads, T tokens, F features, N taps (`ModelConfig.convolution`), I = N - 1 last inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
        self, parts: Sequence[Array], before: Float[Array, "B H I F"] | None, context: TokenContext
    ) -> tuple[list[Array], Float[Array, "B H I F"]]:
        """Return (y of each part, the last inputs of all), where `before` are those before the first token.

        parts: [B, H, T, ...], with F features together. before: None if there are none. y has the dtype of its part;
        sums and the last inputs are float32 at least.
        """
        ends = np.cumsum([x.shape[-1] for x in parts])
        taps = self.param("taps", random_taps, (parts[0].shape[1], self.n_taps, int(ends[-1])))
        split = lambda x: jnp.split(x, ends[:-1], axis=-1)
        befores = [None] * len(parts) if before is None else split(before)
        run = lambda x, taps, before: convolve(self.mesh, x, taps, before, context.place, context.valid)
        ys, lasts = zip(*map(run, parts, split(taps), befores), strict=True)
        last = jnp.concatenate(lasts, axis=-1)
        return list(ys), last.astype(jnp.promote_types(last.dtype, jnp.float32))


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
        before = jnp.zeros((x.shape[0], n_heads, n_taps - 1, n_features))
    before = before.astype(x.dtype)
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
    # The barrier keeps XLA from mixing the inputs again wherever it reads an output.
    y = lax.optimization_barrier(_mix(x, before, taps, places))
    inputs = jnp.concatenate([before, x], axis=2)
    if valid is None:
        return y, inputs[:, :, n_tokens:]
    last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(n_inputs)
    return y, jnp.take_along_axis(inputs, last[:, None, :, None], axis=2)


@jax.custom_vjp
def _mix(
    x: Float[Array, "B H T F"], before: Float[Array, "B H I F"], taps: Float[Array, "H N F"], places: Int[Array, "B T"]
) -> Float[Array, "B H T F"]:
    """y. JAX would save the inputs for each tap."""
    return _over_rows(lambda x, before, places: _mix_row(x, before, taps, places), x, before, places)


@usual_promotion
def _mix_forward(x: Array, before: Array, taps: Array, places: Array) -> tuple[Array, tuple[Array, ...]]:
    return _mix(x, before, taps, places), (x, before, taps, places)


@usual_promotion
def _mix_backward(saved: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, None]:
    x, before, taps, places = saved
    of_row = lambda x, before, dy, places: _mix_row_backward(x, before, taps, dy, places)
    dx, dbefore, dtaps = _over_rows(of_row, x, before, dy, places)
    return dx, dbefore, jnp.sum(dtaps, axis=0), None


_mix.defvjp(_mix_forward, _mix_backward)


def _over_rows(function: Callable[..., Any], *arrays: Array) -> Any:
    """`jax.vmap(function)`. On CPUs one row after the other: XLA drops the barriers there, but fuses no loops."""
    if backend.current() != "cpu" or arrays[-1].shape[1] == 1:
        return jax.vmap(function)(*arrays)
    return lax.map(lambda row: function(*row), arrays)


def _mix_row(
    x: Float[Array, "H T F"], before: Float[Array, "H I F"], taps: Float[Array, "H N F"], places: Int[Array, " T"]
) -> Float[Array, "H T F"]:
    y = taps[:, :1] * x
    for i in range(1, taps.shape[1]):
        y = y + taps[:, i : i + 1] * jnp.where(_seen(i, places), _inputs(x, before, i), 0)
    return y.astype(x.dtype)


def _mix_row_backward(
    x: Float[Array, "H T F"],
    before: Float[Array, "H I F"],
    taps: Float[Array, "H N F"],
    dy: Float[Array, "H T F"],
    places: Int[Array, " T"],
) -> tuple[Array, Array, Array]:
    n_inputs, n_taps = before.shape[1], taps.shape[1]
    dy = dy.astype(jnp.promote_types(dy.dtype, taps.dtype))
    padded = jnp.pad(dy, [(0, 0), (n_inputs, n_inputs), (0, 0)])
    padded_places = jnp.pad(places, n_inputs)

    def gradient(first: int, n: int) -> Array:
        """Of n inputs from the first of `before` or x on."""
        found = jnp.zeros((), dy.dtype)
        for i in range(n_taps):
            later = slice(first + i, first + i + n)  # the outputs that read each input by tap i
            found = found + taps[:, i : i + 1] * jnp.where(_seen(i, padded_places[later]), padded[:, later], 0)
        return found.astype(x.dtype)

    terms = [jnp.where(_seen(i, places), dy, 0) * _inputs(x, before, i) for i in range(n_taps)]
    dtaps = jnp.stack([_sum_tokens(each) for each in terms], axis=1)
    return gradient(n_inputs, x.shape[1]), gradient(0, n_inputs), dtaps


def _inputs(x: Float[Array, "H T F"], before: Float[Array, "H I F"], i: int) -> Float[Array, "H T F"]:
    """The inputs that come i before each token, whatever their documents."""
    first = before.shape[1] - i
    return jnp.concatenate([before, x], axis=1)[:, first : first + x.shape[1]]


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
