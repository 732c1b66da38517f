"""TPUs and GPUs round the factors of float32 products unless they are told not to: the attention tells them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import heinsen
from heinsen.ops.api import IMPLEMENTATIONS
from heinsen.ops.delta import delta_rule

FUNCTIONS = {
    **{f"log, {name}": functools.partial(heinsen.log_attention, implementation=name) for name in IMPLEMENTATIONS},
    **{f"real, {name}": functools.partial(heinsen.attention, implementation=name) for name in IMPLEMENTATIONS},
    "linear": heinsen.linear_attention,
    "sigmoid": heinsen.sigmoid_attention,
    "delta": lambda q, k, v, causal: delta_rule(q, k, v, k[..., 0], log_decay=-k[..., 0])[0],
}


def products(jaxpr):
    """All products in a jaxpr, those of its loops and calls, too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            yield from products(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "pallas" not in name])
def test_products_keep_float32(name, causal):
    x = jnp.ones((2, 40, 8))
    step = jax.value_and_grad(lambda *args: jnp.sum(FUNCTIONS[name](*args, causal=causal)), argnums=(0, 1, 2))
    found = list(products(jax.make_jaxpr(step)(x, x, x).jaxpr))
    rounded = [str(x) for x in found if x.params["precision"] != (lax.Precision.HIGHEST,) * 2]
    assert not rounded
    assert found or name in ("log, scan", "log, reference", "real, scan")
