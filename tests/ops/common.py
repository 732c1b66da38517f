"""The implementations to test anywhere, and jax.jit as users have it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from heinsen.ops import chunk, schedule
from heinsen.ops.api import IMPLEMENTATIONS
from heinsen.ops.values import LOG_DOMAIN, REAL_DOMAIN

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


def run_fast_form(q, k, values, state=None, log_decay=None, signed=False):
    """(log y or y, whether terms were lost) of causal attention by products alone, of a whole number of groups."""
    domain = REAL_DOMAIN if signed else LOG_DOMAIN
    keys = chunk.Keys(k, values, None, None if log_decay is None else log_decay[..., None])
    first = domain.empty_state(k, values) if state is None else state.normalize()
    form = schedule.InOrder(domain, schedule.split_tokens(q.shape), "cpu")
    assert form.split.n_tokens == q.shape[-2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "for_rows", lambda rows, update, out, max_rows: out)
        out, residuals, lost = form.forward(q, keys, first, save_residuals=True)
    exactly = [x for x in (residuals.underflowed, residuals.lost_chunks, lost) if x is not None]
    return out.y, functools.reduce(jnp.logical_or, map(jnp.any, exactly))


def spoil_exact_form(monkeypatch, form):
    """Let NaN take the place of rows that the fast form loses."""
    recompute = form.recompute
    monkeypatch.setattr(form, "recompute", lambda *args: jax.tree.map(lambda x: jnp.nan * x, recompute(*args)))
