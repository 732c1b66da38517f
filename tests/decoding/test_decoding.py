"""Generation: the recurrent form against the parallel one, and draws against exact probabilities."""

import dataclasses
import itertools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from heinsen.config import comparable
from heinsen.decoding import (
    Sampling,
    StateError,
    StopStrings,
    continue_texts,
    decode,
    fork,
    generate,
    generation,
    load_prefix,
    prefill,
    prompts,
    read,
    sample,
    save_prefix,
    saved_state,
    score,
    step_params,
)
from heinsen.decoding.sampling import keep_likeliest
from heinsen.decoding.saved_state import _digest_contents
from heinsen.models import ModelConfig, forward, init_model_state, init_params
from heinsen.models.state import resize_caches
from heinsen.ops import running
from heinsen.ops.states import LogState
from tests.model_configs import model_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

MODEL = model_config(implementation="reference")  # which is compiled soonest
GREEDY = Sampling(temperature=0.0)
full_forward = jax.jit(forward, static_argnums=0)


@pytest.fixture
def params(rng):
    return draw_params(rng, MODEL)


def draw_params(rng, config):
    """A model with opinions: logits with a standard deviation of about 2, lowest for the token just read."""

    def draw(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("scale"):
            return jnp.full(x.shape, -1.0 if name == "norm/scale" else 1.0, x.dtype)
        size = 1 / math.sqrt(x.shape[-2]) if name.endswith("kernel") else 0.4
        return jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init_params(config, jax.random.key(0))))


def draw_tokens(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, MODEL.vocab_size, shape), jnp.int32)


# ---- prefill and steps -----------------------------------------------------------------------


def test_ragged_prompts_and_steps_of_decoding_equal_the_forward_pass_at_every_position(rng):
    """Steps in the form of decoding loops, of parameters that are not stacked, too; all kinds: test_kinds.py."""
    config = dataclasses.replace(MODEL, attention="heinsen,softmax", forget_gate="head", document_token=5)
    params = draw_params(rng, config)
    tokens = np.where(np.asarray(draw_tokens(rng, 2, 24)) == 5, 6, draw_tokens(rng, 2, 24))
    tokens[0, [0, 15]] = tokens[1, 4] = 5
    expected, end = full_forward(config, params, tokens)
    assert np.std(expected) > 1
    lengths = rng.permutation([int(rng.integers(1, 8)), 13])
    ragged = np.where(np.arange(13) < lengths[:, None], tokens[:, :13], 77)
    logits, state = prefill(config, params, ragged, init_model_state(config, 2, 24), lengths)
    rows = np.arange(2)
    np.testing.assert_allclose(logits, expected[rows, lengths - 1], atol=1e-4)
    begin = lambda s: running.to_running(s) if isinstance(s, LogState) else s
    quick_state, own = state._replace(attention=tuple(map(begin, state.attention))), step_params(config, params)
    for step in range(24 - 13):
        now, at = tokens[rows, lengths + step], (rows, lengths + step)
        logits, state = full_forward(config, params, now[:, None], state)
        np.testing.assert_allclose(logits[:, 0], expected[at], atol=1e-4, err_msg=f"step {step}")
        logits, quick_state = full_forward(config, own, now[:, None], quick_state)
        np.testing.assert_allclose(logits[:, 0], expected[at], atol=1e-4, err_msg=f"step {step}")
    sizes = lambda state: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    assert sizes(state) == sizes(init_model_state(config, 2, 24))
    without = dataclasses.replace(config, document_token=None)
    assert np.abs(full_forward(without, params, tokens)[0] - expected).max() > 0.1


ALL_KINDS = "heinsen,softmax,linear,sigmoid,delta"
SOME_KINDS = "heinsen,softmax"  # sigmoid's cache is softmax's, and linear's state adds up as heinsen's does


@pytest.mark.parametrize(
    ("kinds", "document_token"),
    [
        pytest.param(SOME_KINDS, 0, id="some kinds"),
        pytest.param(ALL_KINDS, 269, id="last id", marks=pytest.mark.long),
        pytest.param("real", 0, id="real values", marks=pytest.mark.long),
    ],
)
def test_padding_is_no_token_whatever_id_begins_a_document(rng, monkeypatch, tmp_path, kinds, document_token):
    """Texts read together, saved, scored and continued: as by one forward pass over each text, without padding."""
    changes = dict(value_domain="real") if kinds == "real" else dict(attention=kinds)
    changes |= dict(n_layers=1 + kinds.count(","))
    sizes = dict(vocab_size=270, padded_vocab_size=272, document_token=document_token)
    config = model_config(**changes, **sizes, implementation="reference")
    params, path = draw_params(rng, config), tmp_path / "state"
    # Where a piece begins with a document, the state is the same but slots are counted from there.
    begins = (rng.random((2, 9)) < 0.5) & np.isin(np.arange(9), [0, 1, 2, 5])
    text = np.where(begins, document_token, 1 + rng.choice(np.delete(np.arange(268), 255), (2, 9)))
    logits, end = full_forward(config, params, text)
    log_p = jax.nn.log_softmax(logits)
    monkeypatch.setattr(prompts, "PREFILL_PIECE", 4)  # pieces that are padded, and without any token of a row
    rows, lengths = np.arange(2), np.array([3, 6])
    prefix = read(config, params, [own[:n] for own, n in zip(text, lengths, strict=True)])
    np.testing.assert_allclose(prefix.logits, logits[rows, lengths - 1], atol=1e-4)
    save_prefix(path, config, params, prefix)
    loaded = load_prefix(path, config, params)
    place = lengths[:, None] + np.arange(5)
    for filler in (document_token, 1):  # whatever the caller pads with
        rest = np.where(place < 8, text[rows[:, None], np.minimum(place, 8)], filler)
        got, _, after = score(config, params, loaded, rest, 8 - lengths)
        for row, n in enumerate(lengths):
            want = log_p[row, np.arange(n - 1, 7), text[row, n:8]]
            np.testing.assert_allclose(got[row], np.pad(want, (0, n - 3)), atol=1e-4)
        np.testing.assert_allclose(after.logits, logits[:, 7], atol=1e-4)
        last, state = full_forward(config, params, text[:, 8:], resize_caches(config, after.state, 16))
        np.testing.assert_allclose(last[:, 0], logits[:, 8], atol=1e-4)
        state = resize_caches(config, state, 9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, end)


def test_a_prompt_read_in_pieces_equals_one_read_at_once(rng, params, monkeypatch):
    tokens = draw_tokens(rng, 2, 13)
    read_piece, lengths = prompts._prefill_piece, []
    monkeypatch.setattr(
        prompts, "_prefill_piece", lambda *args: (lengths.append(args[2].shape[1]), read_piece(*args))[1]
    )
    expected, expected_state = prefill(MODEL, params, tokens)
    monkeypatch.setattr(prompts, "PREFILL_PIECE", 4)
    logits, state = prefill(MODEL, params, tokens)
    assert lengths == [32, 4, 4, 4, 4], "padded to powers of two, 32 at least, and no more than a piece"
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, expected_state)


@pytest.mark.parametrize("attention, dtype", [("heinsen", "bfloat16"), ("heinsen,linear", "float32")])
def test_parameters_of_steps_can_take_the_place_of_the_others(rng, attention, dtype):
    config = dataclasses.replace(MODEL, dtype=dtype, attention=attention)
    params = draw_params(rng, config)
    expected = step_params(config, params)
    before = {id(x) for x in jax.live_arrays()} - {id(x) for x in jax.tree.leaves(params)}
    own = step_params(config, params, donate=True)
    n_bytes = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
    assert n_bytes == sum({id(x): x.nbytes for x in jax.tree.leaves(own)}.values())
    jax.tree.map(np.testing.assert_array_equal, own, expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(params["layers"]))


def test_prompts_without_tokens_or_with_ids_outside_the_vocabulary_are_refused(params):
    """The padded rows of the embedding are no tokens."""
    for tokens, lengths in ((jnp.zeros((1, 0), jnp.int32), None), (jnp.zeros((2, 3), jnp.int32), np.array([0, 3]))):
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            prefill(MODEL, params, tokens, lengths=lengths)
    refused = {(): "the prompt has no tokens"} | {(65, i): rf"{i}.*the vocabulary has 257" for i in (-1, 257, 263)}
    for prompt, message in refused.items():
        with pytest.raises(ValueError, match=message):
            next(generate(MODEL, params, np.array(prompt, np.int32), GREEDY, seed=0))


# ---- generate --------------------------------------------------------------------------------


def likeliest_tokens(params, prompt):
    """Return 12 tokens after a prompt of 7, each by a forward pass; None if two are too close, or all the same."""
    written = []
    for _ in range(12):
        tokens = np.zeros((1, 19), np.int32)
        tokens[0, : 7 + len(written)] = [*prompt, *written]
        logits = np.asarray(full_forward(MODEL, params, tokens)[0][0, 6 + len(written)])
        second, best = np.sort(logits[:257])[-2:]
        if best - second < 1e-4:
            return None
        assert logits[257:].max() > best, "a row past the vocabulary wins"
        written.append(int(np.argmax(logits[:257])))
    return written if len(set(written)) > 1 else None


def test_greedy_generation_takes_the_likeliest_token_of_repeated_forward_passes(rng, params):
    # Rows past the vocabulary would win: whatever the hidden state is, one of two opposite ones is large.
    rows = params["embedding"][257:260]
    params["embedding"] = params["embedding"].at[257:263].set(1000.0 * jnp.concatenate([rows, -rows]))
    prompts = (np.asarray(draw_tokens(rng, 7)) for _ in range(10))
    prompt, written = next((prompt, found) for prompt in prompts if (found := likeliest_tokens(params, prompt)))
    assert list(generate(MODEL, params, prompt, GREEDY, seed=0, max_tokens=12)) == written


@pytest.mark.long
@pytest.mark.parametrize("attention", ["heinsen", "heinsen,softmax"])
def test_two_thousand_greedy_tokens_are_those_of_the_forward_pass_from_every_split(rng, attention):
    """The text that decoding writes is the text that one forward pass over all of it would write."""
    config = dataclasses.replace(MODEL, attention=attention)
    params, prompt = draw_params(rng, config), np.asarray(draw_tokens(rng, 11))

    def write(prompt, seed):
        return np.array([*prompt, *generate(config, params, prompt, GREEDY, seed, max_tokens=2011 - len(prompt))])

    def check(text):
        logits = np.asarray(full_forward(config, params, text[None])[0])[0, 10:-1, :257]
        chosen = np.take_along_axis(logits, text[11:, None], axis=-1)[:, 0]
        # Rounding decides between logits that are nearly the same.
        np.testing.assert_allclose(chosen, logits.max(axis=-1), rtol=0, atol=1e-4 * np.abs(logits).max())
        assert np.mean(chosen == logits.max(axis=-1)) > 0.99

    text = write(prompt, seed=0)
    check(text)
    for split in rng.integers(11, 2011, 3).tolist():
        check(write(text[:split], seed=1))


def test_draws_depend_on_the_seed_and_greedy_ones_do_not(rng, params):
    prompt = np.asarray(draw_tokens(rng, 7))
    write = lambda sampling, seed: list(generate(MODEL, params, prompt, sampling, seed, max_tokens=20))
    assert write(Sampling(), 1) == write(Sampling(), 1)
    assert write(Sampling(), 1) != write(Sampling(), 2)
    assert write(GREEDY, 1) == write(GREEDY, 2)
    assert write(Sampling(), 1) != write(GREEDY, 1)


def test_every_draw_of_a_text_has_its_own_randomness(rng, params):
    """A model that always says the same: all letters alike."""
    flat = jax.tree.map(jnp.zeros_like, params)
    written = list(generate(MODEL, flat, np.array([65]), Sampling(), seed=0, max_tokens=60))
    assert len(set(written)) > 40 and all(0 <= token < 257 for token in written)


def test_generation_without_end_is_lazy(rng, params):
    endless = generate(MODEL, params, np.array([65, 66, 67]), Sampling(), seed=0, max_tokens=None)
    first = list(itertools.islice(endless, 30))
    assert first == list(generate(MODEL, params, np.array([65, 66, 67]), Sampling(), seed=0, max_tokens=30))
    assert isinstance(next(endless), int)
    assert list(generate(MODEL, params, np.array([65]), Sampling(), seed=0, max_tokens=0)) == []


def collect(pieces) -> np.ndarray:
    return np.concatenate([tokens for tokens, _ in pieces], axis=1)


def test_rows_do_not_depend_on_each_other_nor_on_the_tokens_a_call(rng, params):
    prompts = [np.asarray(draw_tokens(rng, n)) for n in (3, 9, 5)]
    own = step_params(MODEL, params)
    alone = [list(generate(MODEL, params, prompts[0], Sampling(), 3, max_tokens=10))]
    together = {
        n: collect(
            continue_texts(MODEL, own, read(MODEL, params, prompts), Sampling(), 3, max_tokens=10, tokens_per_call=n)
        )
        for n in (4, 32)
    }
    assert together[32].shape == (3, 10)
    np.testing.assert_array_equal(together[4], together[32])
    np.testing.assert_array_equal(together[32][:1], alone)
    assert len({tuple(row) for row in together[32].tolist()}) == 3


def test_forks_go_on_from_one_reading_in_their_own_ways(rng, params):
    prompt = np.asarray(draw_tokens(rng, 7))
    forked = fork(read(MODEL, params, [prompt]), 4)
    written = collect(continue_texts(MODEL, step_params(MODEL, params), forked, Sampling(), 5, max_tokens=12))
    assert len({tuple(row) for row in written.tolist()}) == 4
    np.testing.assert_array_equal(written[0], list(generate(MODEL, params, prompt, Sampling(), 5, max_tokens=12)))


def test_each_row_stops_by_itself_before_the_stop_id(rng, params):
    prompt = np.asarray(draw_tokens(rng, 5))
    own, prefix = step_params(MODEL, params), read(MODEL, params, [prompt] * 3)

    def write(stop_id=None):
        return collect(
            continue_texts(MODEL, own, prefix, Sampling(), 7, max_tokens=12, tokens_per_call=5, stop_id=stop_id)
        )

    free = write()
    stop_id = int(free[1, 6])
    stopped = write(stop_id)
    end_of = lambda tokens, stop_id: list(tokens).index(stop_id) if stop_id in tokens else 12
    for row, tokens in enumerate(free):
        kept = np.where(np.arange(12) < end_of(tokens, stop_id), tokens, -1)
        np.testing.assert_array_equal(stopped[row], kept[: stopped.shape[1]])
    assert (stopped[1] == -1).any()
    for stop_id in (int(free[0, 6]), next(token for token in range(257) if token not in free[0])):
        alone = list(generate(MODEL, params, prompt, Sampling(), 7, max_tokens=12, stop_id=stop_id))
        assert alone == free[0, : end_of(free[0], stop_id)].tolist()


def test_repetition_is_penalised_as_defined(rng, params):
    """Of tokens in the prompt and of those drawn since; a huge penalty allows none twice while others are likelier."""
    prompt = np.asarray(draw_tokens(rng, 7))
    sampling = Sampling(temperature=0.0, repetition_penalty=1.8)
    written = list(generate(MODEL, params, prompt, sampling, seed=0, max_tokens=10))
    text = list(prompt)
    for token in written:
        padded = np.zeros((1, 19), np.int32)
        padded[0, : len(text)] = text
        logits = np.array(full_forward(MODEL, params, padded)[0][0, len(text) - 1, :257])
        used = logits[text]
        logits[text] = np.where(used > 0, used / 1.8, used * 1.8)
        assert token == np.argmax(logits)
        text.append(token)
    plain = list(generate(MODEL, params, prompt, GREEDY, seed=0, max_tokens=10))
    logits = jnp.asarray(rng.standard_normal((1, 257)))
    seen = jnp.zeros((1, 257), bool).at[0, jnp.argmax(logits)].set(True)
    assert sample(None, logits, Sampling(0.0, repetition_penalty=50.0), 257, seen) != sample(None, logits, GREEDY, 257)
    assert written != plain or not set(plain) & set(prompt.tolist())


def test_texts_of_extreme_exponents_are_decoded_exactly(rng, params):
    """Log values spread over some hundred nats: averages underflow, and the tokens are drawn again in logarithms."""
    bias = np.array(params["layers"]["w1"]["bias"])  # [L, H (2K + V)]
    shaped = bias.reshape(2, 2, 12)
    shaped[..., 8:] = 0
    kernel = np.array(params["layers"]["w1"]["kernel"]).reshape(2, 32, 2, 12)
    kernel[..., 8:] *= 100
    params["layers"]["w1"] = {
        "kernel": jnp.asarray(kernel.reshape(2, 32, 24)),
        "bias": jnp.asarray(shaped.reshape(2, 24)),
    }
    params["layers"]["w2"]["kernel"] = params["layers"]["w2"]["kernel"] / 100
    own, tokens = step_params(MODEL, params), draw_tokens(rng, 1, 40)
    tried, wrapped = [], generation._decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_decode", lambda *args, exact: (tried.append(exact), wrapped(*args, exact=exact))[1])
        written, after, _ = decode(
            MODEL, own, prefill(MODEL, params, tokens), jax.random.split(jax.random.key(0), 1), GREEDY, 8
        )
    assert tried == [False, True]
    text = jnp.concatenate([tokens, written], axis=1)
    logits, state = full_forward(MODEL, params, text)
    np.testing.assert_array_equal(jnp.argmax(logits[:, 39:-1, :257], axis=-1), written)
    np.testing.assert_allclose(after.logits, logits[:, -1], atol=1e-3)


# ---- states on disk --------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["heinsen", "softmax"])
def test_a_saved_state_goes_on_as_the_one_in_memory(rng, tmp_path, attention):
    config = dataclasses.replace(MODEL, attention=attention)
    params = draw_params(rng, config)
    own, prefix = step_params(config, params), read(config, params, [draw_tokens(rng, 9)])
    save_prefix(tmp_path / "state", config, params, prefix)
    loaded = load_prefix(tmp_path / "state", config, params)
    write = lambda prefix: collect(continue_texts(config, own, prefix, Sampling(), 1, max_tokens=9))
    np.testing.assert_array_equal(write(loaded), write(prefix))
    if attention == "heinsen":
        jax.tree.map(np.testing.assert_array_equal, loaded, prefix)
    # Where only speed differs, the state is as good.
    load_prefix(tmp_path / "state", dataclasses.replace(config, implementation="scan", remat="full"), params)


def contents(path) -> tuple[dict, list[np.ndarray]]:
    with np.load(path) as file:
        return json.loads(str(file["header"])), [file[f"array_{i}"] for i in range(len(file) - 1)]


def write_state(path, header, arrays) -> None:
    with open(path, "wb") as file:
        np.savez(file, header=np.array(json.dumps(header)), **{f"array_{i}": x for i, x in enumerate(arrays)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(config, parameters, file, header, arrays) of a state with sums and a cache."""
    config = dataclasses.replace(MODEL, attention="heinsen,softmax")
    params = draw_params(np.random.default_rng(0), config)
    path = tmp_path_factory.mktemp("saved") / "state"
    save_prefix(path, config, params, read(config, params, [[1, 2, 3]]))
    return config, params, path, *contents(path)


def test_a_state_from_before_a_field_of_models_is_read(saved, tmp_path):
    config, params, path, header, arrays = saved
    model = comparable(ModelConfig, header["model"])
    earlier = {"version": header["version"], "model": model, "params": header["params"]}
    write_state(tmp_path / "state", earlier | {"digest": _digest_contents(earlier, arrays)}, arrays)
    jax.tree.map(np.testing.assert_array_equal, *(load_prefix(x, config, params) for x in (path, tmp_path / "state")))
    with pytest.raises(StateError, match="another model: model.feature_map 'none' there, 'elu' here"):
        load_prefix(tmp_path / "state", dataclasses.replace(config, feature_map="elu"), params)


class Pickled:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def flipped(rng, x):
    changed = x.copy()
    changed.reshape(-1).view(np.uint8)[rng.integers(x.nbytes)] ^= 1 << rng.integers(8)
    return changed


NO_STATE = r"state is no saved state, or a damaged one( \((?!.*pickle).*\))?: read the text again"  # no NumPy's advice
OTHER_CONTENTS = "damaged one .*digest is that of other contents"
# name -> (what makes (header, arrays) or the bytes of a file of those of a whole one, the error)
OTHER_STATES = {
    "another version": (
        lambda rng, h, x: (h | {"version": 3}, x),
        "has version 3 of the state format, this program reads 2: read the text",
    ),
    "a flipped bit": (lambda rng, h, x: (h, [flipped(rng, x[0]), *x[1:]]), OTHER_CONTENTS),
    "another shape": (lambda rng, h, x: (h, [x[0][None], *x[1:]]), OTHER_CONTENTS),
    "another dtype": (lambda rng, h, x: (h, [x[0].view(np.uint32), *x[1:]]), OTHER_CONTENTS),
    "an array less": (lambda rng, h, x: (h, x[1:]), OTHER_CONTENTS),
    "another field": (lambda rng, h, x: (h | {"model": h["model"] | {"remat": "x"}}, x), OTHER_CONTENTS),
    "no digest": (lambda rng, h, x: (h | {"digest": None}, x), OTHER_CONTENTS),
    "no version": (lambda rng, h, x: (h | {"version": None}, x), OTHER_CONTENTS),
    "no header": (lambda rng, h, x: ([], x), NO_STATE),
    "nested too deep": (lambda rng, h, x: np.savez("state.npz", header=np.array("[" * 100_000)), NO_STATE),
    "an array": (lambda rng, h, x: np.save("state.npy", x[0]), NO_STATE),
    "an array of objects": (lambda rng, h, x: np.save("state.npy", np.array([{}]), allow_pickle=True), NO_STATE),
    "objects": (lambda rng, h, x: (h, [np.array([Pickled("loaded")]), *x[1:]]), "no saved state, or a damaged one"),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_what_is_no_state_of_this_program_is_refused(rng, saved, tmp_path, monkeypatch, name):
    """Of files that NumPy reads, and without loading a pickle; tests/faults/test_fuzz.py damages the bytes."""
    monkeypatch.chdir(tmp_path)
    config, params, _, header, arrays = saved
    change, message = OTHER_STATES[name]
    if (found := change(rng, header, arrays)) is not None:
        write_state("state", *found)
    (path,) = tmp_path.iterdir()
    path = path.rename(tmp_path / "state")
    with pytest.raises(StateError, match=message):
        load_prefix(path, config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_states_that_are_not_for_this_model_or_cannot_be_read_are_named(saved, tmp_path, monkeypatch):
    config, params, path, *_ = saved
    with pytest.raises(StateError, match="another model: model.document_token None there, 5 here"):
        load_prefix(path, dataclasses.replace(config, document_token=5), params)
    with pytest.raises(StateError, match="with other parameters"):
        load_prefix(path, config, params | {"embedding": params["embedding"] + 1})
    with pytest.raises(StateError, match="nowhere does not exist"):
        load_prefix(tmp_path / "nowhere", config, params)
    monkeypatch.setattr(saved_state, "_read_file", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StateError, match="state cannot be read: Permission denied"):
        load_prefix(path, config, params)


# ---- stop strings ----------------------------------------------------------------------------


def test_stop_strings_end_a_text_wherever_its_pieces_are_cut(rng):
    text = "".join(rng.choice(list("abc"), 60))
    strings = ["cab" + "a" * int(rng.integers(1, 3)), "bbcb", "cc"]
    found = min((text.index(s) for s in strings if s in text), default=len(text))
    cuts = np.sort(rng.integers(0, 61, 9))
    stop, out = StopStrings(strings), ""
    for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
        out += stop.feed(text[start:end])
        assert text.startswith(out)
    assert out + ("" if stop.found else stop.flush()) == text[:found]
    assert stop.found == (found < 60)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["x", ""])


# ---- sampling --------------------------------------------------------------------------------

VOCAB, PADDED = 12, 16
quick_sample = jax.jit(sample, static_argnums=(2, 3))
DRAWS = 20_000


def exact_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """By the definition, in float64; raises unless the choice of kept tokens is clear."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    likeliest = np.argsort(-logits)
    kept = likeliest[: sampling.top_k or len(logits)]
    p = np.exp(logits[kept] - logits[kept[0]])
    p /= p.sum()
    reached = np.cumsum(p)
    if sampling.top_p < 1:
        assert np.abs(reached - sampling.top_p).min() > 1e-4
        kept = kept[: np.searchsorted(reached, sampling.top_p) + 1]
    enough = np.exp(logits[kept] - logits[kept[0]]) >= sampling.min_p
    kept = kept[enough]
    out = np.zeros(len(logits))
    out[kept] = p[: len(kept)] / p[: len(kept)].sum()
    return out


def count_draws(rng, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """How often each token is drawn; the ids past the vocabulary have by far the largest logits."""
    padded = np.concatenate([logits, np.full(PADDED - VOCAB, 50.0)]).astype(np.float32)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), DRAWS)
    drawn = quick_sample(keys, jnp.broadcast_to(padded, (DRAWS, PADDED)), sampling, VOCAB)
    assert drawn.shape == (DRAWS,)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert len(counts) == VOCAB, "an id past the vocabulary"
    return counts


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(temperature=1e-5),
        Sampling(temperature=1e-38),
        Sampling(top_k=1),
        Sampling(top_k=4),
        Sampling(top_k=VOCAB),
        Sampling(top_k=1000),
        Sampling(top_p=0.7),
        Sampling(top_p=0.95),
        Sampling(top_p=1e-6),
        Sampling(temperature=1.5, top_k=7, top_p=0.8),
        Sampling(temperature=0.3, top_p=0.9),
        Sampling(min_p=0.2),
        Sampling(temperature=2.0, top_k=9, top_p=0.95, min_p=0.3),
    ],
    ids=str,
)
def test_draws_have_the_exact_probabilities(rng, sampling):
    while True:
        logits = 1.5 * rng.standard_normal(VOCAB)
        try:
            expected = exact_probabilities(logits, sampling)
            break
        except AssertionError:
            continue
    counts = count_draws(rng, logits, sampling)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    if sampling.min_p:
        assert 1 <= kept.sum() < VOCAB
    elif sampling.top_k or sampling.top_p < 1:
        assert 1 <= kept.sum() <= min(sampling.top_k or VOCAB, VOCAB)
    likely = expected * DRAWS >= 5  # chi-square needs this many
    observed = np.append(counts[likely], counts[kept & ~likely].sum())
    wanted = np.append(expected[likely], expected[kept & ~likely].sum()) * DRAWS
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-7


def test_each_row_is_drawn_by_its_own_logits(rng):
    logits = np.full((5, PADDED), -100.0, np.float32)
    wanted = rng.permutation(VOCAB)[:5]
    logits[np.arange(5), wanted] = 100.0
    keys = jax.random.split(jax.random.key(0), 5)
    for sampling in (Sampling(), GREEDY, Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.5)):
        np.testing.assert_array_equal(sample(keys, jnp.asarray(logits), sampling, VOCAB), wanted)


@pytest.mark.parametrize("sampling", [Sampling(top_k=4), Sampling(top_p=0.35)], ids=str)
def test_tokens_that_are_equally_likely_do_not_lift_the_limit(rng, sampling):
    """Of ten alike, four are the fewest that reach 0.35; which four is open."""
    logits = np.zeros(VOCAB)
    logits[:2] = -50.0
    assert np.count_nonzero(count_draws(rng, logits, sampling)) == 4


quick_keep = jax.jit(keep_likeliest, static_argnums=1)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
def test_the_likeliest_tokens_are_those_of_a_sort_in_float64(rng, top_p):
    """Of random, peaked, flat and tied logits, and of some that underflow or have no probability."""
    n = 5000
    draws = rng.standard_normal((8, n))
    draws *= np.array([1, 10, 1e-3, 1e-7, 3, 2, 40, 1e3])[:, None]
    draws[4] = np.round(draws[4])  # some hundred equal ones at every value
    draws[5] = np.round(draws[5] / 4)
    draws[6, rng.random(n) < 0.5] = -np.inf
    logits = np.float32(draws - draws.max(axis=-1, keepdims=True))
    logits -= logits.max(axis=-1, keepdims=True)
    p = np.exp(np.float64(logits))
    order = np.argsort(-np.float64(logits), axis=-1, kind="stable")
    in_order = np.take_along_axis(p / p.sum(axis=-1, keepdims=True), order, axis=-1)
    before = np.empty_like(p)
    np.put_along_axis(before, order, np.cumsum(in_order, axis=-1) - in_order, axis=-1)
    kept = np.asarray(quick_keep(logits, top_p))
    clear = np.abs(before - top_p) > 2e-6
    np.testing.assert_array_equal(kept[clear], (before < top_p)[clear])
    # The likeliest are a beginning of the sorted order.
    sorted_kept = np.take_along_axis(kept, order, axis=-1)
    np.testing.assert_array_equal(sorted_kept, np.arange(n) < kept.sum(axis=-1, keepdims=True))
    assert kept.any(axis=-1).all()


@pytest.mark.parametrize("n_alike", [1, 2, 7, 1024, 50304])
def test_of_equal_tokens_the_first_are_kept_and_no_more_than_needed(rng, n_alike):
    logits = np.full((1, 50304), -np.inf, np.float32)
    alike = np.sort(rng.choice(50304, n_alike, replace=False))
    logits[0, alike] = 0
    for top_p in (2**-20, 0.25, 0.5, 0.75):
        np.testing.assert_array_equal(np.flatnonzero(quick_keep(logits, top_p)), alike[: math.ceil(top_p * n_alike)])


IMPOSSIBLE = {
    "temperature": (math.nan, -0.1, math.inf),
    "top_k": (-1,),
    "top_p": (0.0, 1.5, -0.5, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "repetition_penalty": (0.0, math.nan, math.inf),
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]])
def test_bad_values_name_their_field(field, value):
    with pytest.raises(ValueError, match=rf"{field} = {value}: it must"):
        Sampling(**{field: value})
