"""Checks of arguments, and their messages, for every public function on arrays."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

ARRAYS = jax.Array | np.ndarray | np.generic
_FLOATS = [jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)]


def check_float(name: str, dtype: DTypeLike) -> None:
    """Raise TypeError unless a dtype is a real floating-point one of at least 16 bits."""
    if (dtype := jnp.dtype(dtype)) not in _FLOATS:
        raise TypeError(
            f"{name} has dtype {dtype}: expected a real floating-point dtype of at least 16 bits; cast it, e.g. to "
            "float32"
        )


def check_integer(name: str, dtype: DTypeLike) -> None:
    """Raise TypeError unless a dtype is one of integers."""
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {dtype}: expected integers")


def check_array(name: str, x: object, check_dtype: Callable[[str, DTypeLike], None] = check_float) -> None:
    """Raise TypeError unless x is an array of a dtype that passes `check_dtype`."""
    if not isinstance(x, ARRAYS):
        raise not_an_array(name, type(x))
    check_dtype(name, x.dtype)


def not_an_array(name: str, kind: type[object]) -> TypeError:
    """The error of an argument of this type."""
    return TypeError(f"{name} is a {kind.__name__}: expected an array, such as jnp.asarray makes of a list")


def check_state(name: str, state: Any, *kinds: type[Any]) -> None:
    """Raise TypeError unless a state is of one of these kinds and made of floating-point arrays."""
    if not isinstance(state, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is a {type(state).__name__}: expected a {expected}, as an earlier call returned it")
    for field, x in zip(state._fields, state, strict=True):
        check_array(f"{name}.{field}", x)


def check_fits(state: Any, shapes: tuple[tuple[int, ...], ...], k: jax.Array, values: jax.Array) -> None:
    """Raise ValueError unless a state's arrays have the shapes that go with k and values."""
    if (got := tuple(x.shape for x in state)) != shapes:
        raise ValueError(
            f"state with shapes {got} does not fit k {k.shape} and values {values.shape}: expected {shapes}"
        )


def check_inputs(q: Array, k: Array, values: Array, causal: bool, segment_ids: Array | None, values_name: str) -> None:
    """Check that q [*batch, T, K], k [*batch, S, K], values [*batch, S, V] and segment_ids fit each other.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes; they call values `values_name`.
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
        raise ValueError(
            f"q, k and {values_name} differ in their leading axes: {shapes}; where n heads of q share one of k and "
            f"{values_name}, repeat both: jnp.repeat(k, n, axis=-3), jnp.repeat({values_name}, n, axis=-3)"
        )
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


def check_per_token(name: str, x: Array, k: Array) -> None:
    """Check x [*batch, T], one number for each of the keys k [*batch, T, K]; the caller calls it `name`.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not fit.
    """
    check_array(name, x)
    if x.shape != k.shape[:-1]:
        raise ValueError(
            f"{name} {x.shape} does not fit k {k.shape}: expected one number for each head and token, "
            f"[*batch, T] = {k.shape[:-1]}"
        )


def check_decay(name: str, log_decay: jax.Array | None, k: jax.Array, causal: bool) -> None:
    """Check the log decays [*batch, T] of keys k [*batch, T, K]. Raises TypeError, ValueError."""
    if log_decay is None:
        return
    check_per_token(name, log_decay, k)
    if not causal:
        raise ValueError(
            f"{name} with causal=False: a token's decay acts on those before it, and without a causal mask none is "
            "before another; leave it out, or attend in both directions with a gate for each by "
            "heinsen.ops.api.attend_both_ways"
        )


def check_implementation(name: str, names: Iterable[str]) -> None:
    """Raise ValueError unless an implementation of the attention has this name."""
    if name not in names:
        raise ValueError(f"implementation {name!r} is not one of {sorted(names)} or None")
