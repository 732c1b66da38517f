"""Answers to the requests of the lm-evaluation-harness: likelihoods of continuations and of whole texts, generation.

`Answers` does the work and needs only this package; `as_lm` wraps it in a model for `lm_eval.simple_evaluate`
(pip install 'heinsen[harness]'). Every text begins a document: the end-of-text token comes before it, as in training,
unless `add_bos_token` is false.

The model's state is carried along, so texts of any length are read whole. Only a model with learned positions has a
limit: there contexts lose their beginning and whole texts are read in windows, as lm-eval's own model class does. A
task that asks for as many tokens as there are positions, or more, gets half as many. All such texts are counted.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from heinsen.data.tokenizer import Tokenizer
from heinsen.decoding import Prefix, Sampling, StopStrings, continue_texts, read, score, step_params
from heinsen.decoding.prompts import TokenIds
from heinsen.errors import InputError
from heinsen.models import ModelConfig, Params

MAX_GENERATED = 256  # tokens, for tasks without a limit


@dataclasses.dataclass
class Answers:
    """A model's answers, computed for `batch_size` texts at a time.

    Attributes:
      add_bos_token: whether end-of-text comes before every text; if not, it does where a context would be empty.
      n_truncated: number of texts so far that were too long for the model's positions.
      n_written: number of texts written so far. What a text draws depends on its number, not on its batch.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    batch_size: int = 32
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items
    add_bos_token: bool = True
    n_truncated: int = 0
    n_written: int = 0

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), return its log-likelihood in nats, and whether greedy decoding writes it.

        Each context is read once for all of its continuations. Raises ValueError for an empty continuation.
        """
        answers = [(0.0, True)] * len(requests)
        of_context: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for i, (context, continuation) in enumerate(requests):
            for before, after in self._windows(*self._split(context, continuation)):
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
                rows_prefix = jax.tree.map(lambda x, rows=rows: x[rows], prefix)
                scores = self._score(rows_prefix, [after for _, _, after in part])
                for (_, i, _), (log_p, is_greedy) in zip(part, scores, strict=True):
                    answers[i] = answers[i][0] + log_p, answers[i][1] and is_greedy
        return answers

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihoods of whole texts, from their first token on, in nats."""
        answers = [0.0] * len(texts)
        windows = [
            (i, *window)
            for i, text in enumerate(texts)
            if text
            for window in self._windows([self.tokenizer.eot_id], [*map(int, self.tokenizer.encode(text))])
        ]
        for part in self._batches(sorted(windows, key=lambda item: len(item[2])), "reading texts"):
            prefix = read(self.config, self.params, [before for _, before, _ in part])
            scores = self._score(prefix, [after for _, _, after in part])
            for (i, _, _), (log_p, _) in zip(part, scores, strict=True):
                answers[i] += log_p
        return answers

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """For each (context, arguments), generate up to a string in `until`, the document's end or max_gen_toks.

        Greedy, unless do_sample with temperature, top_k, top_p, min_p. Raises ValueError for unknown arguments.
        """
        answers = [""] * len(requests)
        alike: dict[tuple[Sampling, tuple[str, ...], int], list[int]] = {}
        for i, (_, arguments) in enumerate(requests):
            alike.setdefault(_parse_generation(arguments), []).append(i)
        decode_params, positions = step_params(self.config, self.params), self.config.max_positions
        for (sampling, until, max_tokens), members in alike.items():
            prompts = {i: self._begin(self.tokenizer.encode(requests[i][0])) for i in members}
            if positions is not None:
                is_short = max_tokens < positions  # else no position would be left for the prompt
                max_tokens = max_tokens if is_short else positions // 2
                room = positions - max_tokens
                self.n_truncated += sum(not is_short or len(prompt) > room for prompt in prompts.values())
                prompts = {i: prompt[-room:] for i, prompt in prompts.items()}
            for part in self._batches(sorted(members, key=lambda i: len(prompts[i])), "writing"):
                numbers = [self.n_written + i for i in part]
                texts = self._write(decode_params, [prompts[i] for i in part], numbers, sampling, until, max_tokens)
                for i, text in zip(part, texts, strict=True):
                    answers[i] = text
        self.n_written += len(requests)
        return answers

    def _write(
        self,
        decode_params: Params,
        prompts: list[list[int]],
        numbers: list[int],
        sampling: Sampling,
        until: tuple[str, ...],
        max_tokens: int,
    ) -> list[str]:
        """Continue prompts up to a string in `until`, with parameters from `step_params`."""
        prefix, texts = read(self.config, self.params, prompts), [""] * len(prompts)
        stops = [StopStrings(until) for _ in prompts]
        decoders = [self.tokenizer.stream_decoder() for _ in prompts]
        pieces = continue_texts(
            self.config, decode_params, prefix, sampling, 0, max_tokens, self.tokenizer.eot_id, numbers=numbers
        )
        for tokens, _ in pieces:
            for i, row in enumerate(tokens):
                for token in row[row >= 0]:
                    texts[i] += stops[i].feed(decoders[i].feed(int(token)))
            if all(stop.found or row[-1] < 0 for stop, row in zip(stops, tokens, strict=True)):
                break
        return [
            text + stop.feed(decoder.flush()) + stop.flush()
            for text, stop, decoder in zip(texts, stops, decoders, strict=True)
        ]

    def _begin(self, tokens: TokenIds) -> list[int]:
        """Return the tokens with what comes before every text."""
        own = [*map(int, tokens)]
        return [self.tokenizer.eot_id, *own] if self.add_bos_token or not own else own

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the context, with what comes before every text, and those of the continuation.

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
        return self._begin(whole[:n]), [*map(int, whole[n:])]

    def _windows(self, context: list[int], continuation: list[int]) -> list[tuple[list[int], list[int]]]:
        """Divide what the model cannot read at once into (context, continuation) whose sum is its log-likelihood.

        The model reads all tokens but the last. Of a continuation with more tokens than there are positions, each
        window predicts as many tokens as there are positions, and the last one the rest; before them come as many
        tokens of the text as there is room for, and at least one.
        """
        whole, begin, room = context + continuation, len(context), self.config.max_positions
        if room is None or len(whole) - 1 <= room:
            return [(context, continuation)]
        self.n_truncated += 1
        starts = range(begin, len(whole), room)
        ends = [min(start + room, len(whole)) for start in starts]
        return [
            (whole[max(0, end - 1 - room) : start], whole[start:end]) for start, end in zip(starts, ends, strict=True)
        ]

    def _score(self, prefix: Prefix, texts: Sequence[list[int]]) -> list[tuple[float, bool]]:
        """Return each text's log-likelihood after the prefix, and whether all of its tokens are the likeliest."""
        last = np.array([text[-1] for text in texts])
        lengths = np.array([len(text) - 1 for text in texts])  # nothing follows the last token: it is not read
        tokens = np.zeros((len(texts), lengths.max()), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text) - 1] = text[:-1]
        log_p, likeliest, prefix = score(self.config, self.params, prefix, tokens, lengths)
        last_log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(prefix.logits)), last[:, None], axis=1)[:, 0]
        is_likeliest = np.argmax(prefix.logits[:, : self.config.vocab_size], axis=1) == last
        return [
            (float(p[:n].sum() + p_last), bool(best[:n].all() and is_best))
            for p, best, n, p_last, is_best in zip(log_p, likeliest, lengths, last_log_p, is_likeliest, strict=True)
        ]

    def _batches(self, items: list[Any], what: str) -> Iterable[list[Any]]:
        starts = range(0, len(items), self.batch_size)
        return self.progress([items[start : start + self.batch_size] for start in starts], what)


def _parse_generation(arguments: dict[str, Any]) -> tuple[Sampling, tuple[str, ...], int]:
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

        def get_model_info(self) -> dict[str, Any]:
            """Return what lm-eval reports of the model, after all requests."""
            return {"add_bos_token": answers.add_bos_token, "n_truncated": answers.n_truncated}

    return HarnessModel()
