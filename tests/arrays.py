"""NumPy arrays where heinsen's annotations say JAX arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_jax(tree: Any) -> Any:
    """Convert the NumPy arrays and scalars of a tree to JAX arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x, tree)


def takes_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its NumPy arguments converted by `to_jax`."""

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        return function(*to_jax(args), **to_jax(kwargs))

    return converted
