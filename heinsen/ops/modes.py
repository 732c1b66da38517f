"""Operations that have derivatives in one mode alone say so, however and wherever they are differentiated.

Both are identities. JAX applies the tangent of the first one in forward mode, and transposes it in reverse mode; of the
second one it is the transpose that fails. `Name` is of the operation, as in the error.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

X = TypeVar("X")


class Name(NamedTuple):
    """Name of a function without a derivative, and the remedy, such as ", or ..."."""

    what: str
    instead: str = ""


def reverse_mode_only(name: Name) -> Callable[[X], X]:
    """An identity of an operation's arguments. A TypeError says that it has no forward mode where one is applied.

    All arguments go together: in forward over reverse mode some have a tangent of the outer mode alone.
    """
    mark = jax.custom_jvp(jax.lax.stop_gradient)  # with another derivative, an identity
    mark.defjvp(lambda arrays, tangents: (arrays[0], _bind(_reverse_only, name, tangents[0])))
    return mark


def forward_mode_only(name: Name, arrays: X) -> X:
    """The arrays, part of a gradient. A TypeError says that it has no gradient where cotangents are pulled back."""
    return _bind(_forward_only, name, arrays)


def _bind(primitive: Primitive, name: Name, arrays: X) -> X:
    bind = lambda x: primitive.bind(x, name=name) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(bind, arrays)


def _refuse_forward(x: Any, *, name: Name) -> Any:
    raise TypeError(
        f"{name.what} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): use reverse mode (jax.grad, "
        f"jax.vjp, jax.jacrev){name.instead}"
    )


def _refuse_reverse(cotangent: Any, x: Any, *, name: Name) -> Any:
    raise TypeError(
        f"{name.what} has no gradient of its gradient (jax.grad of jax.grad): take jax.jvp of jax.grad{name.instead}"
    )


def _linear(name: str, evaluate: Any, transpose: Any) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda x, *, name: x)
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=False))
    ad.deflinear2(primitive, transpose)
    batching.defvectorized(primitive)
    return primitive


_reverse_only = _linear("reverse_mode_only", _refuse_forward, lambda cotangent, x, *, name: [cotangent])
_forward_only = _linear("forward_mode_only", lambda x, *, name: x, _refuse_reverse)
