"""The short causal convolution: each feature of a layer's queries, keys and values mixed with its last few inputs.

    y[t] = sum_{i < N} taps[i] x[t - i]     over the tokens t - i of t's document

It is depthwise: every feature has N taps of its own. Its state is the last N - 1 inputs. The taps start random, so that
y has the variance of x: where they start as the identity, a model learns far later to bring a value together with the
key before it (docs/log/2026-11.md, "taps that start random").

Axes: B batch, H heads, T tokens, F features, N taps (`ModelConfig.convolution`), I = N - 1 last inputs.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from heinsen.models.mixers import TokenContext
from heinsen.parallel import BATCH, MeshError, on_each_device


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
def _mix(x: Array, taps: Float[Array, "H N F"], places: Int[Array, "B T"]) -> Array:
    """y [B, H, T, F] of inputs x [B, H, I + T, F] from before the tokens on. JAX would save them for each tap."""
    y = taps[:, :1] * _input(x, 0, places)
    for i in range(1, taps.shape[1]):
        y = y + taps[:, i : i + 1] * _where_seen(_input(x, i, places), i, places)
    return y


def _mix_forward(x: Array, taps: Array, places: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _mix(x, taps, places), (x, taps, places)


def _mix_backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, taps, places = saved
    n_taps, dx, dtaps = taps.shape[1], jnp.zeros_like(x), []
    for i in range(n_taps):
        seen = _where_seen(dy, i, places)
        dx = dx + jnp.pad(taps[:, i : i + 1] * seen, [(0, 0), (0, 0), (n_taps - 1 - i, i), (0, 0)])
        dtaps.append(_sum_tokens(seen * _input(x, i, places)))
    return dx, jnp.stack(dtaps, axis=1), None


_mix.defvjp(_mix_forward, _mix_backward)


def _input(x: Array, i: int, places: Array) -> Array:
    """The inputs [B, H, T, F] that come i before each token, whatever their documents."""
    end = x.shape[2] - i
    return x[:, :, end - places.shape[1] : end]


def _where_seen(x: Array, i: int, places: Array) -> Array:
    """x [B, H, T, F] where the input i before a token is of its document, else 0."""
    return jnp.where((places >= i)[:, None, :, None], x, 0) if i else x


def _sum_tokens(x: Float[Array, "B H T F"]) -> Float[Array, "H F"]:
    """Sum over rows and tokens, by halves: XLA's CPU backend is many times slower at its own sum of a product."""
    while x.shape[2] > 8:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)])
        half = x.shape[2] // 2
        x = x[:, :, :half] + x[:, :, half:]
    return jnp.sum(x, axis=(0, 2))
