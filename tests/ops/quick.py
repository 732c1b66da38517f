"""jax.jit with less of the optimization that takes most of the tests' time, and with all that users get."""

import contextlib
import functools

import jax
import jax.numpy as jnp


def _options():
    """XLA's options, as far as this jaxlib knows them."""
    options = {}
    for name, value in (("xla_backend_optimization_level", 0), ("xla_cpu_use_fusion_emitters", False)):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(jnp.negative, compiler_options={name: value}).lower(1.0).compile()
            options[name] = value
    return options


quick_jit = functools.partial(jax.jit, compiler_options=_options())

# tests/conftest.py turns the emitters off for all other compilations.
user_jit = functools.partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True})
