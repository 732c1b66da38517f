"""Validation of a run in progress."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.decoding import Sampling, generate
from heinsen.evaluation.loss import Evaluation, evaluate, make_eval_step, mean_of_mixture
from heinsen.models import ModelConfig, Params
from heinsen.models.language_model import layer_records
from heinsen.parallel import place_batch, replicated, split_batch
from heinsen.training.config import TrainConfig
from heinsen.training.data import RunData
from heinsen.training.metrics import SAMPLE


class Validator:
    """Measures the validation loss of a run's parameters, its forget gate's time constants, and a sample."""

    def __init__(self, config: TrainConfig, mesh: Mesh, data: RunData) -> None:
        self._config, self._mesh, self._data = config, mesh, data
        self._eval_step = make_eval_step(config.model, mesh)
        self._time_constants_step = None
        if config.model.forget_gate != "none":
            self._time_constants_step = _make_time_constants_step(config.model, mesh)
        self._tokenizer = get_tokenizer(data.tokenizer, data.tokenizer_folder) if config.sample_tokens else None

    def __call__(self, params: Params) -> tuple[Evaluation, dict[str, float | str]]:
        """Return the mean over the datasets by their shares, and the metrics to report."""
        mean, results = self._measure(self._eval_step, params)
        metrics: dict[str, float | str] = {
            "validation_loss": mean.loss,
            "validation_bits_per_byte": mean.bits_per_byte,
        }
        if len(results) > 1:
            names = [f"validation_loss/{name}" for name, _, _ in self._data.validation]
            metrics |= {name: result.loss for name, result in zip(names, results, strict=True)}
        metrics |= self._time_constants(params)
        if self._tokenizer is not None:
            metrics[SAMPLE] = self._write_sample(params, self._tokenizer)
        return mean, metrics

    def measure_teacher(self, params: Params) -> Evaluation:
        """Return the mean for the teacher of a conversion, before the first step."""
        return self._measure(make_eval_step(self._config.teacher, self._mesh), params)[0]

    def _measure(self, eval_step: Callable[..., jax.Array], params: Params) -> tuple[Evaluation, list[Evaluation]]:
        """Return the mean over the datasets, and each."""
        results = [evaluate(eval_step, params, batches, self._mesh) for _, _, batches in self._data.validation]
        shares = [share for _, share, _ in self._data.validation]
        weighted = list(zip(results, shares, strict=True))
        return mean_of_mixture(weighted, self._data.validation_bytes_per_token), results

    def _time_constants(self, params: Params) -> dict[str, float]:
        """Time constants of a forget gate on the first dataset's first batch."""
        if self._time_constants_step is None:
            return {}
        tokens = next(iter(self._data.validation[0].batches))["tokens"]
        time_constants = self._time_constants_step(params, place_batch(self._mesh, tokens))
        return {name: float(x) for name, x in jax.device_get(time_constants).items()}

    def _write_sample(self, params: Params, tokenizer: Tokenizer) -> str:
        """Return a new document of `sample_tokens` tokens, always drawn with the same random numbers.

        Every process draws it on a device of its own, from a whole copy of the parameters.
        """
        whole = jax.device_put(params, replicated(self._mesh))
        own = jax.tree.map(lambda x: x.addressable_data(0), whole)
        c = self._config
        model = dataclasses.replace(c.model, vocab_size=tokenizer.vocab_size)  # the model's may have more ids
        tokens = generate(model, own, [tokenizer.eot_id], Sampling(), c.seed, c.sample_tokens)
        return tokenizer.decode(list(tokens))


def _make_time_constants_step(model: ModelConfig, mesh: Mesh) -> Callable[[Params, jax.Array], dict[str, jax.Array]]:
    """Return a compiled step: (params, windows [B, T + 1]) -> metrics of a model's forget gate.

    They are every head's time constant in tokens, 1 / -log of its mean decay, at most 1e7. No token is masked.
    """

    def step(params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
        tokens = tokens[:, :-1] if model.causal else tokens[:, 1:]
        metrics: dict[str, jax.Array] = {}
        for i, heads in layer_records(model, params, tokens, mesh)["decay"].items():
            rates = jnp.maximum(-jnp.log(heads), 1e-7)
            metrics |= {f"time_constant/layer_{i}/head_{j}": 1 / rate for j, rate in enumerate(rates)}
        return metrics

    return jax.jit(step, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))
