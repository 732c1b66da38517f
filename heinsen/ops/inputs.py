"""What every attention function does with its arguments: checks, one dtype, and where documents start.

Axes: T queries, S keys, K key and V value features; `*batch` is any leading axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from heinsen.ops.checks import ARRAYS, check_array, check_float, check_integer, not_an_array
from heinsen.ops.decay import take_resets
from heinsen.ops.documents import document_starts


def prepare_inputs(
    q: Array,
    k: Array,
    values: Array,
    log_decay: Array | None,
    causal: bool,
    segment_ids: Array | None,
    values_name: str,
) -> tuple[tuple[Array, Array, Array], Array | None, Array | None]:
    """(q, k and values in the dtype of the arithmetic, resets [*batch, T], log_decay), validated: see `check_inputs`.

    A reset is where nothing is left of the tokens before: a document starts, or log_decay, 0 there, is -inf.
    """
    check_inputs(q, k, values, causal, segment_ids, values_name)
    dtype = jnp.promote_types(jnp.result_type(q, k, values), jnp.float32)
    resets = None
    if segment_ids is not None:
        resets = jnp.broadcast_to(document_starts(segment_ids), k.shape[:-1])
    if log_decay is not None:
        check_log_decay(log_decay, k, causal)
        log_decay, resets = take_resets(log_decay.astype(dtype), resets)
    return (q.astype(dtype), k.astype(dtype), values.astype(dtype)), resets, log_decay


def check_inputs(q: Array, k: Array, values: Array, causal: bool, segment_ids: Array | None, values_name: str) -> None:
    """q [*batch, T, K], k [*batch, S, K] and values [*batch, S, V], which the caller calls `values_name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    for name, x in (("q", q), ("k", k), (values_name, values)):
        if not isinstance(x, ARRAYS):
            raise not_an_array(name, type(x))
        check_float(name, x.dtype)
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
        check_array("segment_ids", segment_ids, check_integer)
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


def check_known_tokens(*numbers: int) -> None:
    """Raise ValueError where a number of tokens is symbolic (`jax.export`)."""
    for n_tokens in numbers:
        if not isinstance(n_tokens, int):
            raise ValueError(
                f"a symbolic number of tokens, {n_tokens}, where this attention needs a known one: export a function "
                "for each length (the batch may be symbolic), or pass implementation='reference' where there is one"
            )


def check_log_decay(log_decay: Array, k: Array, causal: bool, name: str = "log_decay") -> None:
    """log_decay [*batch, T] for keys k [*batch, T, K]; the caller calls it `name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit or without causality.
    """
    check_array(name, log_decay)
    if not causal:
        raise ValueError(
            "log_decay with causal=False: a token's decay acts on those before it, and without a causal mask none is "
            "before another; leave out log_decay, or attend in both directions with a gate for each "
            "by heinsen.ops.api.attend_both_ways"
        )
    if log_decay.shape != k.shape[:-1]:
        raise ValueError(
            f"{name} {log_decay.shape} does not fit k {k.shape}: expected one number for each head and token, "
            f"[*batch, T] = {k.shape[:-1]}"
        )


def on_automatic_axes(function: Callable[..., tuple[Array, Any]], q: Array, *args: Any) -> tuple[Array, Any]:
    """function(q, *args), whose outputs are y [*batch, T, V] and a tree of arrays [*batch, ...], on any mesh.

    Where q [*batch, T, K] lies on a mesh with explicit axes, the compiler divides the work within, and the outputs are
    divided as q is.
    """
    sharding = jax.typeof(q).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(q, *args)
    axes: list[Any] = [*sharding.spec] + [None] * (q.ndim - len(sharding.spec))
    *batch, tokens, _ = axes
    return jax.sharding.auto_axes(function, out_sharding=(P(*batch, tokens), P(*batch)))(q, *args)
