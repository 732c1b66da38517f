"""Generation: prompts read in parallel, tokens drawn in one compiled loop, each at a cost that no context changes.

    prefix = prefill(config, params, prompts, lengths)              the next tokens' logits, the state after the prompts
    tokens, prefix, _ = decode(config, step_params(config, params), prefix, ...)           many tokens a call
    save_prefix(path, config, params, prefix); fork(prefix, 8)

A `Prefix` is all there is to know about text that was read: it can be kept on disk, and continued many times.
Layers with a cache (softmax) grow with the context; only the others are constant.

Axes: B sequences, T tokens of a prompt, N tokens drawn.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from heinsen.errors import HeinsenError
from heinsen.models import (
    ModelConfig,
    ModelState,
    Params,
    capacity,
    check_room,
    forward,
    hidden_states,
    init_model_state,
    logits_of,
    unstack,
    with_capacity,
)
from heinsen.ops import states
from heinsen.ops.softmax import KVCache
from heinsen.ops.states import LogState

PREFILL_PIECE = 512  # tokens of a prompt read at once: bounds the memory of a prompt of any length
STATE_VERSION = 1


class StateError(HeinsenError, ValueError):
    """A saved state that cannot be used here."""


class Prefix(NamedTuple):
    """Text that has been read: the logits of its next token, and the model's state after it."""

    logits: Float[Array, "B padded_vocab"]
    state: ModelState


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: repetition penalty, temperature, then top_k, top_p and min_p, in this order.

    temperature 0 takes the likeliest. top_k keeps the k likeliest tokens (0: all), top_p of these the fewest that reach
    this probability (1: all), min_p those at least so many times as likely as the likeliest (0: all). The logits of
    tokens that are in the text already are divided by repetition_penalty where positive, multiplied where negative.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not (0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature = {self.temperature}: it must be finite and not negative")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: it must not be negative (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: it must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: it must lie in [0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}: it must be finite and positive")


# ---- reading -----------------------------------------------------------------------------------------------------


def prefill(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> Prefix:
    """Read prompts in parallel, piece by piece, after what `state` has read (None: nothing).

    Args:
      params: of `init_params`.
      lengths: how many tokens each prompt has, at least one, where they are padded at their end; None: T.

    Raises ValueError for an empty prompt, one beyond the model's learned positions, and masked models.
    """
    tokens = np.asarray(tokens, np.int32)
    n_rows, n_tokens = tokens.shape
    lengths = np.full(n_rows, n_tokens) if lengths is None else np.asarray(lengths)
    if n_tokens == 0 or lengths.min() < 1:
        raise ValueError("the prompt has no tokens: give at least one (an end-of-text token begins a document)")
    state = init_model_state(config, n_rows) if state is None else state
    _check_positions(config, state, tokens, lengths)
    state = _with_room(state, lengths)
    prefix = Prefix(jnp.zeros((n_rows, config.padded_vocab_size), state.position.dtype), state)
    for _, own, piece in _pieces(tokens, lengths):
        prefix = _prefill_piece(config, params, piece, prefix, None if own.min() == piece.shape[1] else own)
    return prefix


@partial(jax.jit, static_argnums=0)
def _prefill_piece(config, params, tokens_BxT, prefix, lengths_B):
    logits, state = forward(config, params, tokens_BxT, prefix.state, lengths_B, last_only=True)
    if lengths_B is not None:
        logits = jnp.where((lengths_B > 0)[:, None], logits, prefix.logits)
    return Prefix(logits, state)


def _check_positions(config, state, tokens_BxT, lengths_B):
    """Raises ValueError where these tokens go beyond learned positions; looks at nothing where there are none."""
    if config.position == "learned":
        check_room(config, _longest_document(config, state, tokens_BxT, lengths_B))


def _longest_document(config, state, tokens_BxT, lengths_B):
    """How many tokens the longest document has, of those that the state is in and those that begin among the tokens."""
    longest = 0
    begun = np.asarray(state.n_tokens) - np.asarray(state.document_start)
    for row, length, before in zip(tokens_BxT, lengths_B, begun, strict=True):
        begins = np.flatnonzero(row[:length] == config.document_token) if config.document_token is not None else []
        longest = max(longest, *np.diff([-before, *begins, length]))
    return int(longest)


def score(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"], Prefix]:
    """Of texts that go on from a prefix: each token's log-likelihood in nats, whether it was the likeliest, the prefix
    with them. Read piece by piece, as by `prefill`.

    Args:
      params: of `init_params`.
      lengths: how many tokens each row has, where rows are padded at their end (there both results are 0); None: T.

    Raises ValueError for a text beyond the model's learned positions.
    """
    tokens = np.asarray(tokens, np.int32)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    log_p, likeliest = np.zeros(tokens.shape), np.zeros(tokens.shape, bool)
    _check_positions(config, prefix.state, tokens, lengths)
    prefix = prefix._replace(state=_with_room(prefix.state, lengths))
    for start, own, piece in _pieces(tokens, lengths):
        *found, prefix = _score_piece(config, params, piece, prefix, own)
        width = min(piece.shape[1], tokens.shape[1] - start)
        for whole, part in zip((log_p, likeliest), found, strict=True):
            whole[:, start : start + width] = np.asarray(part)[:, :width]
    return log_p, likeliest, prefix


@partial(jax.jit, static_argnums=0)
def _score_piece(config, params, tokens_BxT, prefix, lengths_B):
    x_BxTxD, state = hidden_states(config, params, tokens_BxT, prefix.state, lengths_B)

    def next_token(logits, token):
        x, target = token
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]
        likeliest = jnp.argmax(logits[:, : config.vocab_size], axis=-1)
        return logits_of(config, params, x), (log_p, likeliest == target)

    steps = x_BxTxD.swapaxes(0, 1), tokens_BxT.T
    _, (log_p, likeliest) = jax.lax.scan(next_token, prefix.logits, steps)
    within = jnp.arange(tokens_BxT.shape[1]) < lengths_B[:, None]
    last = jnp.take_along_axis(x_BxTxD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.where((lengths_B > 0)[:, None], logits_of(config, params, last), prefix.logits)
    return jnp.where(within, log_p.T, 0.0), within & likeliest.T, Prefix(logits, state)


def _pieces(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first column, each row's number of tokens, the tokens), padded to a power of two: few compiled programs."""
    for start in range(0, int(lengths.max()), PREFILL_PIECE):
        own = np.clip(lengths - start, 0, PREFILL_PIECE)
        padded = min(PREFILL_PIECE, 1 << int(own.max() - 1).bit_length())
        yield start, own, np.pad(tokens[:, start : start + own.max()], [(0, 0), (0, padded - own.max())])


def _with_room(state: ModelState, n_more: np.ndarray | int) -> ModelState:
    """The state with caches for so many tokens more; they grow by doubling, which few compiled programs follow."""
    room = capacity(state)
    if room is None:
        return state
    n_tokens = int(np.max(state.n_tokens + n_more))
    return state if room >= n_tokens else with_capacity(state, max(128, 1 << (n_tokens - 1).bit_length()))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def decode_step(
    config: ModelConfig, params: Params, tokens: Int[Array, " B"], state: ModelState
) -> tuple[Float[Array, "B padded_vocab"], ModelState]:
    """One more token per sequence: the next token's logits, and the new state (the one given is donated).

    A cache must have room. Steps of one token each round the state in logarithms: over 10^6 tokens that is an error of
    1e-2 in log y, where the loop of `decode` has 1e-4 (tests/test_decoding.py).
    """
    logits, state = forward(config, params, tokens[:, None], state)
    return logits[:, -1], state


# ---- drawing -----------------------------------------------------------------------------------------------------


def sample(
    keys: Array,
    logits: Float[Array, "B padded_vocab"],
    sampling: Sampling,
    vocab_size: int,
    seen: Bool[Array, "B vocab"] | None = None,
) -> Int[Array, " B"]:
    """Draw a token id below vocab_size for each row with its key [B]; `seen` marks the tokens to be penalised."""
    logits = logits[:, :vocab_size]
    if seen is not None:
        factor = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Below 1e-30 the division could overflow; the largest logit stays 0 and is drawn alone long before.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    draw = jax.vmap(jax.random.categorical)
    if 0 < sampling.top_k < vocab_size or sampling.top_p < 1:
        # Drawn by rank, so that tokens of equal probability do not slip in beyond the limit.
        descending, order = jax.lax.top_k(logits, min(sampling.top_k or vocab_size, vocab_size))
        if sampling.top_p < 1:
            p = jax.nn.softmax(descending, axis=-1)
            descending = jnp.where(jnp.cumsum(p, axis=-1) - p < sampling.top_p, descending, -jnp.inf)
        rank = draw(keys, _at_least(sampling.min_p, descending))
        return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)
    return draw(keys, _at_least(sampling.min_p, logits)).astype(jnp.int32)


def _at_least(min_p, logits):
    """Logits whose largest is 0, without those of tokens less than min_p times as likely as the likeliest."""
    return logits if min_p == 0 else jnp.where(logits >= np.log(min_p), logits, -jnp.inf)


def step_params(config: ModelConfig, params: Params) -> Params:
    """The parameters as `decode` wants them: each layer's own, matrices in the matmuls' dtype."""
    own = unstack(config, params)
    cast = lambda path, x: x.astype(config.dtype) if path[-1].key == "kernel" else x
    # Tokens are looked up in the embedding as it is; the product that makes logits reads it in the matmuls' dtype.
    return jax.tree_util.tree_map_with_path(cast, own) | {"head": own["embedding"].astype(config.dtype)}


def decode(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    keys: Array,
    sampling: Sampling,
    n_tokens: int,
    first: int = 0,
    stop_id: int | None = None,
    seen: Bool[Array, "B vocab"] | None = None,
    buffer: int | None = None,
) -> tuple[np.ndarray, Prefix, Bool[Array, "B vocab"] | None]:
    """Draw tokens in one compiled loop: (int [B, n_tokens], the text with them, `seen` with them).

    Args:
      params: of `step_params`.
      prefix: what was read; its caches are donated.
      keys: one random key a row, which draws token number i of a text with fold_in(key, i).
      first: how many tokens of the text were drawn before.
      stop_id: a row ends before this token; from there on its tokens are -1.
      seen: which tokens were in the texts, for the repetition penalty; None: there is none.
      buffer: compile for as many tokens, and draw n_tokens of them at most; None: n_tokens.

    Raises ValueError where the text could go beyond the model's learned positions.
    """
    if config.position == "learned":
        check_room(config, int(np.max(prefix.state.n_tokens - prefix.state.document_start)) + n_tokens)
    buffer = n_tokens if buffer is None else buffer
    state = _with_room(prefix.state, n_tokens)
    for exact in (False, True):
        caches, rest = _split(state)
        arguments = (caches, prefix._replace(state=rest), keys, first, n_tokens, stop_id, seen)
        tokens, after, after_seen, was_exact = _decode(config, sampling, buffer, exact, params, *arguments)
        if bool(was_exact):
            break
        # Some average underflowed: the same tokens again in logarithms. What the caches hold of them is written anew.
        state = state._replace(attention=_joined(rest.attention, _split(after.state)[0]))
    return np.asarray(tokens)[:, :n_tokens], after, after_seen


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _decode(config, sampling, buffer, exact, params, caches, prefix, keys, first, n_tokens, stop_id, seen):
    state = prefix.state._replace(attention=_joined(prefix.state.attention, caches))
    if not exact:
        begin = lambda s: states.begin_steps(s) if isinstance(s, LogState) else s
        state = state._replace(attention=tuple(map(begin, state.attention)))
    n_rows = prefix.logits.shape[0]

    def drawing(carry):
        return (carry[0] < n_tokens) & ~jnp.all(carry[-1])

    def draw(carry):
        i, tokens, logits, state, seen, ended = carry
        token = sample(
            jax.vmap(jax.random.fold_in, (0, None))(keys, first + i), logits, sampling, config.vocab_size, seen
        )
        if stop_id is not None:
            ended = ended | (token == stop_id)
        tokens = tokens.at[:, i].set(jnp.where(ended, -1, token))
        if seen is not None:
            seen = seen.at[jnp.arange(n_rows), token].set(True)
        logits, state = forward(config, params, token[:, None], state, last_only=True)
        return i + 1, tokens, logits, state, seen, ended

    tokens = jnp.full((n_rows, buffer), -1, jnp.int32)
    carry = (0, tokens, prefix.logits, state, seen, jnp.zeros(n_rows, bool))
    _, tokens, logits, state, seen, _ = jax.lax.while_loop(drawing, draw, carry)
    was_exact = jnp.ones((), bool)
    if not exact:
        attention = []
        for layer_state in state.attention:
            if isinstance(layer_state, states.RunningState):
                layer_state, fits = states.end_steps(layer_state)
                was_exact &= jnp.all(fits)
            attention.append(layer_state)
        state = state._replace(attention=tuple(attention))
    return tokens, Prefix(logits, state), seen, was_exact


def _split(state: ModelState) -> tuple[tuple[KVCache | None, ...], ModelState]:
    """(the caches of the layers that have one, the state without them)."""
    is_cache = [isinstance(s, KVCache) for s in state.attention]
    caches = tuple(s if cached else None for s, cached in zip(state.attention, is_cache, strict=True))
    rest = tuple(None if cached else s for s, cached in zip(state.attention, is_cache, strict=True))
    return caches, state._replace(attention=rest)


def _joined(states, caches):
    return tuple(cache if state is None else state for state, cache in zip(states, caches, strict=True))


# ---- texts -------------------------------------------------------------------------------------------------------


def check_prompt(config: ModelConfig, prompt: Sequence[int]) -> np.ndarray:
    """The prompt as int32 [T]. Raises ValueError for an empty one, or ids outside the vocabulary."""
    prompt = np.asarray(prompt, np.int32)
    if prompt.size == 0:
        raise ValueError("the prompt has no tokens: give at least one (an end-of-text token begins a document)")
    if not (0 <= prompt.min() and prompt.max() < config.vocab_size):
        raise ValueError(
            f"prompt ids reach from {prompt.min()} to {prompt.max()}: the vocabulary has {config.vocab_size}"
        )
    return prompt


def read(
    config: ModelConfig, params: Params, prompts: Sequence[Sequence[int]], state: ModelState | None = None
) -> Prefix:
    """Prompts of any lengths, read together, after what `state` [as many rows] has read. Raises ValueError."""
    prompts = [check_prompt(config, prompt) for prompt in prompts]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in prompts])
    return prefill(config, params, tokens, state, lengths)


def fork(prefix: Prefix, n: int) -> Prefix:
    """n copies of each row, next to each other, to go on from it in n ways."""
    return jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), prefix)


def continue_texts(
    config: ModelConfig,
    params: Params,
    prefix: Prefix,
    sampling: Sampling,
    seed: int,
    max_tokens: int | None = None,
    stop_id: int | None = None,
    texts: Sequence[Sequence[int]] | None = None,
    tokens_per_call: int = 32,
) -> Iterator[tuple[Int[np.ndarray, "B N"], Prefix]]:
    """Go on from what was read, some tokens at a time: (their ids, -1 where a row has ended; the text with them).

    Ends when all rows have, or after max_tokens (None: never). Row r draws with fold_in(key(seed), r), whatever the
    other rows and however many tokens a call.

    Args:
      params: of `step_params`.
      texts: the tokens of each row so far, for the repetition penalty.
    """
    n_rows = prefix.logits.shape[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(n_rows))
    seen = None
    if sampling.repetition_penalty != 1:
        seen = np.zeros((n_rows, config.vocab_size), bool)
        for row, text in enumerate(texts or ()):
            seen[row, np.asarray(text, np.int32)] = True
    prefix = jax.tree.map(jnp.copy, prefix) if capacity(prefix.state) is not None else prefix  # `decode` takes caches
    n_drawn, ended = 0, np.zeros(n_rows, bool)
    while not ended.all() and (max_tokens is None or n_drawn < max_tokens):
        n = tokens_per_call if max_tokens is None else min(tokens_per_call, max_tokens - n_drawn)
        tokens, prefix, seen = decode(
            config, params, prefix, keys, sampling, n, n_drawn, stop_id, seen, buffer=tokens_per_call
        )
        tokens = np.where(ended[:, None], -1, tokens)
        ended |= (tokens < 0).any(axis=1)
        n_drawn += n
        yield tokens, prefix


def generate(
    config: ModelConfig,
    params: Params,
    prompt: Sequence[int],
    sampling: Sampling,
    seed: int,
    max_tokens: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `prompt` (int [T]), one at a time, until `stop_id`, `max_tokens`, or without end.

    Raises ValueError for an empty prompt or ids outside the vocabulary.
    """
    prefix = read(config, params, [prompt])
    own = step_params(config, params)
    for tokens, _ in continue_texts(config, own, prefix, sampling, seed, max_tokens, stop_id, [prompt]):
        yield from (int(token) for token in tokens[0] if token >= 0)


class StopStrings:
    """Passes text on as it comes, up to the first of some strings; holds back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]):
        if not all(strings):
            raise ValueError("a stop string is empty: every text would end at once")
        self.strings, self.held, self.found = tuple(strings), "", False

    def feed(self, text: str) -> str:
        """What can be passed on now; nothing after a stop string was found."""
        if self.found:
            return ""
        text = self.held + text
        if hits := [text.index(s) for s in self.strings if s in text]:
            self.found, self.held = True, ""
            return text[: min(hits)]
        begun = [n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n])]
        keep = len(text) - max(begun, default=0)
        self.held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self.held = self.held, ""
        return text


# ---- on disk -----------------------------------------------------------------------------------------------------


def save_prefix(path: Path, config: ModelConfig, params: Params, prefix: Prefix) -> None:
    """Write what was read to one file (.npz), at once. Raises OSError.

    It holds the logits and the state, caches without their free room, and the model it belongs to: all fields of its
    config that change what a state means, and a digest of `params` (of `init_params`).
    """
    prefix = jax.tree.map(np.asarray, prefix)
    used = int(prefix.state.n_tokens.max())
    trim = lambda s: KVCache(s.k[..., :used, :], s.v[..., :used, :]) if isinstance(s, KVCache) else s
    prefix = prefix._replace(state=prefix.state._replace(attention=tuple(map(trim, prefix.state.attention))))
    arrays = {f"array_{i}": _as_bits(x) for i, x in enumerate(jax.tree.leaves(prefix))}
    header = {
        "version": STATE_VERSION,
        "rows": len(prefix.logits),
        "model": _identity(config),
        "params": digest(params),
    }
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, header=np.array(json.dumps(header)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_prefix(path: Path, config: ModelConfig, params: Params) -> Prefix:
    """What `save_prefix` wrote. Raises StateError: no such file, a damaged one, or a state of another model."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["version"] != STATE_VERSION:
                raise StateError(
                    f"{path} has version {header['version']} of the state format, this program reads {STATE_VERSION}: "
                    "read the text again"
                )
            arrays = [file[f"array_{i}"] for i in range(len(file.files) - 1)]
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist: save a state there first (--save_state)") from error
    except StateError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(f"{path} is no saved state, or a damaged one ({error}): read the text again") from error
    own = _identity(config)
    if differing := [name for name in own if header["model"].get(name) != own[name]]:
        told = "; ".join(f"model.{n} {header['model'].get(n)!r} there, {own[n]!r} here" for n in differing)
        raise StateError(f"{path} is a state of another model: {told}")
    if header["params"] != digest(params):
        raise StateError(
            f"{path} is a state of a model of this shape with other parameters: use the run it was made by"
        )
    empty = jax.eval_shape(lambda: init_model_state(config, header["rows"]))
    logits = jax.ShapeDtypeStruct((), empty.position.dtype)
    leaves, structure = jax.tree.flatten(Prefix(logits, empty))
    return structure.unflatten([jnp.asarray(x.view(leaf.dtype)) for x, leaf in zip(arrays, leaves, strict=True)])


def digest(params: Params) -> str:
    """A hash of all parameters' names and values."""
    whole = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        whole.update(jax.tree_util.keystr(path).encode())
        whole.update(np.ascontiguousarray(x).data if x.dtype == np.float32 else np.asarray(x).tobytes())
    return whole.hexdigest()[:32]


def _as_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16, which .npz files do not know, as integers."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def _identity(config: ModelConfig) -> dict:
    """The fields that make a state what it is."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in ("remat", "implementation")}
