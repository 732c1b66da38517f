"""Checks of arrays and states for every public function, whatever their shapes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        raise TypeError(
            f"{name} is a {type(state).__name__}: expected a {expected} (see heinsen.init_state, "
            "heinsen.init_linear_state)"
        )
    for field, x in zip(state._fields, state, strict=True):
        check_array(f"{name}.{field}", x)


def check_fits(state: Any, shapes: tuple[tuple[int, ...], ...], k: jax.Array, values: jax.Array) -> None:
    """Raise ValueError unless a state's arrays have the shapes that go with k and values."""
    if (got := tuple(x.shape for x in state)) != shapes:
        raise ValueError(
            f"state with shapes {got} does not fit k {k.shape} and values {values.shape}: expected {shapes}"
        )
