"""Additions to a model: parameters with which they do nothing, and what the published module lacks."""

import dataclasses

import jax
import numpy as np
import pytest

from heinsen.export import is_reference_model
from heinsen.models import ModelConfig, forward, init_params
from heinsen.models.additions import ADDITIONS, identity_params
from tests.model_configs import model_config
from tests.models.model64 import SIZES, draw_params

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

full_forward = jax.jit(forward, static_argnums=0)


def merged(params, others):
    """`params` with the leaves of `others` in their places."""
    if not isinstance(others, dict):
        return others
    return {**params, **{name: merged(params.get(name, {}), x) for name, x in others.items()}}


@pytest.mark.parametrize("attention", [pytest.param("heinsen", marks=pytest.mark.long), "heinsen,linear"])
def test_identity_parameters_make_a_model_the_one_without_the_parts_bit_for_bit(rng, attention):
    """A checkpoint of the paper's model can start one with them."""
    without = model_config(**SIZES, attention=attention)
    config = dataclasses.replace(without, convolution=4, output_gate=True)
    identity = identity_params(config)
    assert identity_params(without) == {}
    own, tokens = draw_params(without, rng), np.int32(rng.integers(0, 13, (2, 8)))
    together = merged(own, identity)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert jax.tree.map(np.shape, together) == jax.tree.map(lambda x: x.shape, shapes)
    want = full_forward(without, own, tokens)[0]
    np.testing.assert_array_equal(full_forward(config, together, tokens)[0], want)
    flat, tree = jax.tree.flatten(identity)
    for i in range(len(flat)):  # each one matters
        moved = [x + 0.3 * (i == j) for j, x in enumerate(flat)]
        other = full_forward(config, merged(own, jax.tree.unflatten(tree, moved)), tokens)[0]
        assert np.abs(other - want).max() > 1e-3


def test_every_part_is_a_field_that_the_papers_model_has_not():
    for name, addition in ADDITIONS.items():
        assert name in {field.name for field in dataclasses.fields(ModelConfig)}
        assert getattr(model_config(), name) == addition.absent


@pytest.mark.parametrize(
    "changes",
    [dict(convolution=4), dict(output_gate=True), dict(forget_gate="head")],
    ids=str,
)
def test_the_published_module_has_no_such_addition(changes):
    """Not even where the parameters have the same names and shapes."""
    assert is_reference_model(model_config()) and not is_reference_model(model_config(**changes))
