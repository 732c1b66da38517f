"""Mixers: the kinds of attention that a layer can have.

To add a kind, write one class of `Mixer` in a file of its own and register it here.
"""

from collections.abc import Callable
from typing import Any

from heinsen.models.mixers.base import Mixer, TokenContext
from heinsen.models.mixers.delta import Delta
from heinsen.models.mixers.heinsen import VALUE_DOMAINS, Heinsen
from heinsen.models.mixers.linear import Linear
from heinsen.models.mixers.sigmoid import Sigmoid
from heinsen.models.mixers.softmax import Softmax

# Names in `ModelConfig.attention`: how the mixer is built from a `ModelConfig`. Raises ValueError.
MIXERS: dict[str, Callable[[Any], Mixer[Any]]] = {
    "heinsen": Heinsen.from_config,
    "softmax": Softmax.from_config,
    "sigmoid": Sigmoid.from_config,
    "linear": Linear.from_config,
    "delta": Delta.from_config,
}

__all__ = ["MIXERS", "Mixer", "TokenContext", "VALUE_DOMAINS"]
