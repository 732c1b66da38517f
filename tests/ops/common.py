"""The implementations to test anywhere, small sizes of what they take at a time, and jax.jit as users have it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from heinsen.ops import chunked, delta, linear, sigmoid, softmax
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


SMALL_SPLIT = chunked.Split(chunk=4, block=2, rows=2)
SMALL = 4  # tokens


@contextlib.contextmanager
def small_sizes(wanted=True):
    """Within the block, few tokens, which compile fast, are several chunks and blocks, where that is `wanted`."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(chunked, "choose_split", lambda shape: SMALL_SPLIT)
            patch.setattr(delta, "choose_chunk", lambda n_tokens, d_key: SMALL)
            sizes = [(linear, "_CHUNK"), (sigmoid, "_LARGEST_BLOCK"), (sigmoid, "_SMALLEST_BLOCK")]
            for module, name in [*sizes, (softmax, "_SMALLEST_BLOCK")]:
                patch.setattr(module, name, SMALL)
        yield
