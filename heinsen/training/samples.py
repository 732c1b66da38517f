"""Samples of a run in progress: text that its model writes."""

import jax
from jax.sharding import Mesh

from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Sampling, generate
from heinsen.models import Params
from heinsen.parallel import replicated
from heinsen.training.config import TrainConfig


class Sampler:
    """Writes a new document of `sample_tokens` tokens with a run's parameters, always with the same random numbers.

    Every process draws it on a device of its own, from a whole copy of the parameters.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, tokenizer: str) -> None:
        self._config, self._mesh = config, mesh
        self._tokenizer = get_tokenizer(tokenizer)

    def __call__(self, params: Params) -> str:
        whole = jax.device_put(params, replicated(self._mesh))
        own = jax.tree.map(lambda x: x.addressable_data(0), whole)
        c = self._config
        tokens = generate(c.model, own, [self._tokenizer.eot_id], Sampling(), c.seed, c.sample_tokens)
        return self._tokenizer.decode(list(tokens))
