"""Additions to a model, and the parameters with which they do nothing.

Added to a trained model with these parameters, an addition leaves its outputs unchanged.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from heinsen.models.config import ModelConfig
from heinsen.models.convolution import identity_taps
from heinsen.models.gate import spread_biases
from heinsen.models.language_model import Params, abstract_params


@dataclasses.dataclass(frozen=True)
class Addition:
    """What a field of `ModelConfig` adds to a model.

    Attributes:
      absent: the field's value without it.
      identity: the end of a parameter's path -> its value with which the addition does nothing, from (config, shape).
    """

    absent: Any
    identity: Mapping[str, Callable[[ModelConfig, tuple[int, ...]], Array]]


def _zeros(config: ModelConfig, shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape)


_GATE = {  # with a scale of 0; the other parameters learn once it has left 0
    "scale": _zeros,
    "kernel": _zeros,
    "bias": lambda config, shape: spread_biases(config.forget_gate_shortest, config.forget_gate_longest, shape),
}

ADDITIONS: dict[str, Addition] = {  # by the name of the field
    "forget_gate": Addition(
        "none", {f"/{name}/{end}": identity for name in ("gate", "gate_after") for end, identity in _GATE.items()}
    ),
    "output_gate": Addition(False, {"output_gate/kernel": _zeros, "output_gate/bias": _zeros}),  # 2 sigmoid(0) = 1
    "convolution": Addition(0, {"convolution/taps": lambda config, shape: identity_taps(shape)}),
}


def identity_params(config: ModelConfig) -> Params:
    """Return the parameters of the additions with which they do nothing, and no others, as in `init_params`."""
    identities = [each for addition in ADDITIONS.values() for each in addition.identity.items()]
    params: Params = {}
    for path, x in jax.tree_util.tree_leaves_with_path(abstract_params(config)):
        *groups, name = (key.key for key in path)
        if identity := next((f for end, f in identities if "/".join([*groups, name]).endswith(end)), None):
            group = params
            for each in groups:
                group = group.setdefault(each, {})
            group[name] = identity(config, x.shape)
    return params
