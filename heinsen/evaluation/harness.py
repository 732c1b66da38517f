"""Answers to the requests of the lm-evaluation-harness: likelihoods of continuations and of whole texts, generation.

`Answers` does the work and needs only this package; `as_lm` wraps it in a model for `lm_eval.simple_evaluate`
(pip install 'heinsen[harness]'). Every text begins a document: the end-of-text token comes before it, as in training.
The model's state is carried along, so no text is truncated.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from heinsen.data.tokenizer import Tokenizer
from heinsen.decoding import Prefix, Sampling, StopStrings, continue_texts, read, score, step_params
from heinsen.errors import InputError
from heinsen.models import ModelConfig, Params

MAX_GENERATED = 256  # tokens, for tasks without a limit


@dataclasses.dataclass
class Answers:
    """A model's answers, computed for `batch_size` texts at a time."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    batch_size: int = 32
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), return its log-likelihood in nats, and whether greedy decoding writes it.

        Each context is read once for all of its continuations. Raises ValueError for an empty continuation.
        """
        answers: list[Any] = [None] * len(requests)
        of_context: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        for i, (context, continuation) in enumerate(requests):
            before, after = self._split(context, continuation)
            of_context.setdefault(tuple(before), []).append((i, after))
        # Contexts of similar length together need little padding.
        contexts = sorted(of_context, key=len)
        for prompts in self._batches(contexts, "reading contexts"):
            prefix = read(self.config, self.params, prompts)
            asked = [(row, i, after) for row, prompt in enumerate(prompts) for i, after in of_context[prompt]]
            asked.sort(key=lambda item: len(item[2]))
            for start in range(0, len(asked), self.batch_size):
                part = asked[start : start + self.batch_size]
                rows = np.array([row for row, _, _ in part])
                log_p, likeliest, lengths = self._score(_rows(prefix, rows), [after for _, _, after in part])
                for (_, i, _), p, best, n in zip(part, log_p, likeliest, lengths, strict=True):
                    answers[i] = float(p[:n].sum()), bool(best[:n].all())
        return answers

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihoods of whole texts, from their first token on, in nats."""
        answers = [0.0] * len(texts)
        tokens = {i: self.tokenizer.encode(text) for i, text in enumerate(texts) if text}
        for part in self._batches(sorted(tokens, key=lambda i: len(tokens[i])), "reading texts"):
            prefix = read(self.config, self.params, [[self.tokenizer.eot_id]] * len(part))
            log_p, _, _ = self._score(prefix, [tokens[i] for i in part])
            for i, p in zip(part, log_p, strict=True):
                answers[i] = float(p.sum())
        return answers

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """For each (context, arguments), generate up to a string in `until`, the document's end or max_gen_toks.

        Greedy, unless do_sample with temperature, top_k, top_p, min_p. Raises ValueError for unknown arguments.
        """
        answers = [""] * len(requests)
        alike: dict[tuple[Sampling, tuple[str, ...], int], list[int]] = {}
        for i, (_, arguments) in enumerate(requests):
            alike.setdefault(_generation(arguments), []).append(i)
        own = step_params(self.config, self.params)
        eot = self.tokenizer.eot_id
        for (sampling, until, max_tokens), members in alike.items():
            prompts = {i: [eot, *map(int, self.tokenizer.encode(requests[i][0]))] for i in members}
            for part in self._batches(sorted(members, key=lambda i: len(prompts[i])), "writing"):
                prefix = read(self.config, self.params, [prompts[i] for i in part])
                stops = [StopStrings(until) for _ in part]
                decoders = [self.tokenizer.stream_decoder() for _ in part]
                for tokens, _ in continue_texts(self.config, own, prefix, sampling, 0, max_tokens, eot):
                    for row, i in enumerate(part):
                        for token in tokens[row][tokens[row] >= 0]:
                            answers[i] += stops[row].feed(decoders[row].feed(int(token)))
                    if all(stop.found or row[-1] < 0 for stop, row in zip(stops, tokens, strict=True)):
                        break
                for row, i in enumerate(part):
                    answers[i] += stops[row].feed(decoders[row].flush()) + stops[row].flush()
        return answers

    def _split(self, context: str, continuation: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of the context, including end-of-text at its beginning, and those of the continuation.

        They are the tokens of the joined text.
        """
        if not continuation:
            raise InputError(f"an empty continuation after {context[-40:]!r} has no likelihood")
        spaces = len(context) - len(context.rstrip())  # a word's token includes the space before it
        context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
        n = len(self.tokenizer.encode(context)) if context else 0
        whole = self.tokenizer.encode(context + continuation)
        # If the joined text has fewer tokens than the context, the last token belongs to the continuation.
        n = min(n, len(whole) - 1)
        return [self.tokenizer.eot_id, *map(int, whole[:n])], np.asarray(whole[n:], np.int32)

    def _score(self, prefix: Prefix, texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lengths = np.array([len(text) for text in texts])
        tokens = np.stack([np.pad(np.asarray(text, np.int32), (0, lengths.max() - len(text))) for text in texts])
        log_p, likeliest, _ = score(self.config, self.params, prefix, tokens, lengths)
        return log_p, likeliest, lengths

    def _batches(self, items: list[Any], what: str) -> Iterable[list[Any]]:
        starts = range(0, len(items), self.batch_size)
        return self.progress([items[start : start + self.batch_size] for start in starts], what)


def _rows(prefix: Prefix, rows: np.ndarray) -> Prefix:
    return jax.tree.map(lambda x: x[rows], prefix)


def _generation(arguments: dict[str, Any]) -> tuple[Sampling, tuple[str, ...], int]:
    """Parse generation arguments: (sampling, stop strings, largest number of tokens). Raises ValueError."""
    rest = dict(arguments)
    until = rest.pop("until", [])
    until = (until,) if isinstance(until, str) else tuple(until or ())
    max_tokens = int(rest.pop("max_gen_toks", MAX_GENERATED))
    drawn = {name: rest.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in rest}
    if not rest.pop("do_sample", drawn.get("temperature", 0) > 0):
        drawn = {"temperature": 0.0}
    if rest:
        raise InputError(
            f"unknown generation arguments {sorted(rest)}: use until, max_gen_toks, do_sample, "
            "temperature, top_k, top_p, min_p"
        )
    return Sampling(**drawn), until, max_tokens


def as_lm(answers: Answers) -> Any:
    """Wrap the answers in an `lm_eval.api.model.LM`. Raises ImportError if lm-eval is not installed."""
    from lm_eval.api.model import LM

    class HarnessModel(LM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return answers.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return answers.generate_until([request.args for request in requests])

    return HarnessModel()
