"""JAX's usual promotion of ranks and dtypes, whatever a program has set for its own arithmetic."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def usual_promotion(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, traced with usual promotion also under `jax_numpy_rank_promotion="raise"` and
    `jax_numpy_dtype_promotion="strict"`.

    It is for what users call, and for rules of derivatives, which JAX may trace after the function has returned.
    """

    @functools.wraps(function)
    def promoting(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoting
