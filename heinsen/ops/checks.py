"""What every public attention function asks of its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def check_inputs(q: Array, k: Array, values: Array, causal: bool, segment_ids: Array | None, values_name: str) -> None:
    """q [*batch, T, K], k [*batch, S, K] and values [*batch, S, V], which the caller calls `values_name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    for name, x in (("q", q), ("k", k), (values_name, values)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"{name} is a {type(x).__name__}: expected an array, such as jnp.asarray({name})")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {x.dtype}: expected a real floating-point dtype; cast it, e.g. to float32"
            )
        if x.ndim < 2 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: expected [*batch, tokens, features], none of them empty")
    shapes = f"q {q.shape}, k {k.shape}, {values_name} {values.shape}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in their last axis, the number of key features: {shapes}")
    if k.shape[-2] != values.shape[-2]:
        raise ValueError(f"k and {values_name} differ in their number of tokens (axis -2): {shapes}")
    if not q.shape[:-2] == k.shape[:-2] == values.shape[:-2]:
        raise ValueError(f"q, k and {values_name} differ in their leading axes: {shapes}")
    if q.shape[-2] != k.shape[-2]:
        if causal:
            raise ValueError(f"causal attention needs as many queries as keys: {shapes}; pass causal=False")
        if segment_ids is not None:
            raise ValueError(f"segment_ids need as many queries as keys: {shapes}")
    if segment_ids is not None:
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise TypeError(f"segment_ids have dtype {segment_ids.dtype}: expected integers")
        if 1 < segment_ids.ndim < k.ndim - 1:  # [B, T] would be taken for heads where there are as many as B
            axes = ", ".join([":", *["None"] * (k.ndim - 1 - segment_ids.ndim), ":"])
            raise ValueError(
                f"segment_ids {segment_ids.shape} for k {k.shape}: expected [T], or an axis for each of [*batch, T]; "
                f"where all heads have the same documents, [B, 1, T]: pass segment_ids[{axes}]"
            )
        try:
            fits = jnp.broadcast_shapes(segment_ids.shape, k.shape[:-1]) == k.shape[:-1]
            fits = fits and segment_ids.shape[-1:] == k.shape[-2:-1]
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"segment_ids {segment_ids.shape} do not broadcast to [*batch, T] = {k.shape[:-1]}")


def check_known_tokens(*arrays: Array) -> None:
    """Raise ValueError where a number of tokens (axis -2) is symbolic (`jax.export`)."""
    for x in arrays:
        if not isinstance(x.shape[-2], int):
            raise ValueError(
                f"shape {x.shape} has a symbolic number of tokens, and this attention needs a known one: export a "
                "function for each length (the batch may be symbolic), or pass implementation='reference' where there "
                "is one"
            )


def check_log_decay(log_decay: Array, k: Array, causal: bool, name: str = "log_decay") -> None:
    """log_decay [*batch, T] for keys k [*batch, T, K]; the caller calls it `name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit or without causality.
    """
    if not jnp.issubdtype(log_decay.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {log_decay.dtype}: expected a real floating-point dtype")
    if not causal:
        raise ValueError(
            "log_decay with causal=False: a token's decay acts on those before it, and without a causal mask none is "
            "before another; leave out log_decay, or attend in both directions by two causal calls"
        )
    if log_decay.shape != k.shape[:-1]:
        raise ValueError(
            f"{name} {log_decay.shape} does not fit k {k.shape}: expected one number for each head and token, "
            f"[*batch, T] = {k.shape[:-1]}"
        )
