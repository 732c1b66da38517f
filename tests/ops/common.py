"""The implementations to test anywhere, and jax.jit as users have it."""

import contextlib
import functools

import jax
import jax.numpy as jnp

from heinsen.ops import chunked
from heinsen.ops.api import IMPLEMENTATIONS

PORTABLE = sorted(IMPLEMENTATIONS.keys() - {"pallas"})  # the implementations that run on every platform


def _known(**options):
    """Those of XLA's options that this jaxlib knows."""

    def is_known(name):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(jnp.negative, compiler_options={name: options[name]}).lower(1.0).compile()
            return True
        return False

    return {name: value for name, value in options.items() if is_known(name)}


# With the optimization that tests/conftest.py turns off for all other compilations.
user_jit = functools.partial(
    jax.jit, compiler_options=_known(xla_backend_optimization_level=3, xla_cpu_use_fusion_emitters=True)
)


SMALL_SPLIT = chunked.Split(chunk=4, block=2, rows=2)  # few tokens, which compile fast, are several chunks


def split_small(monkeypatch):
    """Let the chunked form take few tokens at a time."""
    monkeypatch.setattr(chunked, "choose_split", lambda shape: SMALL_SPLIT)
