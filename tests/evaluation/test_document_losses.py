"""Losses by document against the definition: every document alone, whole, in one forward pass; and sums by loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.data.dataset import TokenDataset
from heinsen.data.documents import DocumentBatches, find_documents
from heinsen.data.tokenizer import get_tokenizer
from heinsen.evaluation import document_losses
from heinsen.evaluation.bootstrap import estimate, estimate_sources
from heinsen.evaluation.document_losses import N_RANGES, DocumentLosses, measure_streaming, measure_windows
from heinsen.evaluation.positions import Comparison, Context, PositionLosses, compare_positions, plot_positions
from heinsen.evaluation.tables import format_positions
from heinsen.models import abstract_params, forward, init_params
from heinsen.parallel import make_mesh
from tests.model_configs import model_config
from tests.runs import EOT, run_config, write_split

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

WINDOW = 16


def draw_documents(rng, folder, lengths, sources=None):
    """A split of documents of so many tokens, with the names of their sources if they have any."""
    stream = np.concatenate([np.append(rng.integers(97, 123, n - 1), EOT) for n in lengths])
    write_split(folder, stream, sources=[sources] if sources else [])
    return find_documents(TokenDataset(folder), get_tokenizer("bytes"))


def filled(documents, rng, window=WINDOW, forgets=False, scale=1.0):
    """(sums of drawn losses, added in a few pieces in any order; the losses in the order of the stream)."""
    sums, losses = DocumentLosses(documents, window, forgets), scale * rng.exponential(size=int(documents.starts[-1]))
    for piece in np.array_split(rng.permutation(len(losses)), 5):
        sums.add(piece, losses[piece].astype(np.float32))
    return sums, losses


def read_alone(model, params, stream):
    """-log p [D, N] of the tokens of documents that each end with EOT, by the definition: every one alone and whole."""
    ends = np.flatnonzero(stream == EOT) + 1
    lengths = np.diff(ends, prepend=0)
    rows = np.full((len(ends), 1 + lengths.max()), EOT, np.int32)
    for row, end, length in zip(rows, ends, lengths, strict=True):
        row[1 : 1 + length] = stream[end - length : end]
    logits = np.float64(jax.jit(forward, static_argnums=0)(model, params, rows[:, :-1])[0])
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0], lengths


# ---- the model's losses ----------------------------------------------------------------------


FORGETS = pytest.param(EOT, id="document_token", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[pytest.param(None, id="context across documents"), FORGETS])
def model(request, data):
    return dataclasses.replace(run_config(data).model, n_layers=1, document_token=request.param)


def test_streaming_is_every_document_alone_and_whole(model, rng, tmp_path):
    documents = draw_documents(rng, tmp_path / "split", rng.permutation([1, 2, 15, 16, 17, 70, 40, 33, 5, 8]))
    draw = lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)
    params, mesh = jax.tree.map(draw, abstract_params(model)), make_mesh()

    assert DocumentBatches(documents, WINDOW, 3).window_sizes == [16]
    streamed = measure_streaming(model, params, mesh, documents, WINDOW, 3)
    nats, lengths = read_alone(model, params, documents.dataset.read(0, documents.dataset.n_tokens))
    np.testing.assert_array_equal(documents.lengths, lengths)
    for d, length in enumerate(documents.lengths):
        for first, last in [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128)]:
            want = nats[d, first - 1 : min(last, length)].sum()
            assert streamed.nats[d, (last - 1).bit_length()] == pytest.approx(want, rel=1e-4, abs=1e-6)

    if model.document_token is not None:  # in windows it sees no more than the document either
        windows = measure_windows(model, params, mesh, documents, WINDOW, 3)
        starts_a_window = documents.starts[:-1] % WINDOW == 0
        within = documents.starts[:-1] % WINDOW + documents.lengths <= WINDOW
        assert within.any() and (~within & ~starts_a_window).any()
        np.testing.assert_allclose(windows.nats[within], streamed.nats[within], rtol=1e-4, atol=1e-6)
        assert np.abs(windows.nats - streamed.nats).max() > 1e-3


ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax, numpy as np
from heinsen.data.dataset import TokenDataset
from heinsen.data.documents import find_documents
from heinsen.data.tokenizer import get_tokenizer
from heinsen.evaluation.document_losses import measure_streaming
from heinsen.models import init_params
from heinsen.parallel import MeshConfig, make_mesh
from tests.model_configs import model_config

documents = find_documents(TokenDataset(Path(sys.argv[1])), get_tokenizer("bytes"))
model = model_config(implementation="reference", document_token=256)
params = jax.device_get(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)))
measure = lambda mesh: measure_streaming(model, params, mesh, documents, 16, 4).nats
want = measure(make_mesh(devices=jax.devices()[:1]))
for sizes in (1, 2, 1, 2), (2, 1, 2, 1):
    np.testing.assert_allclose(measure(make_mesh(MeshConfig(*sizes))), want, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.long
def test_states_of_streams_lie_on_meshes(rng, commands, tmp_path):
    draw_documents(rng, tmp_path / "split", rng.permutation([1, 2, 15, 16, 17, 70, 40, 33, 5, 8]))
    done = commands.run("-W", "error", "-c", ON_FOUR_DEVICES, tmp_path / "split", devices=4)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_losses_do_not_depend_on_the_id_that_pads(rng, data, tmp_path, monkeypatch):
    documents = draw_documents(rng, tmp_path / "split", [5, 20, 3, 18, 1])
    kinds = dict(attention="heinsen,softmax,linear,sigmoid", n_layers=4, document_token=EOT)
    model, mesh = dataclasses.replace(run_config(data).model, **kinds), make_mesh()
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))

    def measure(filler):
        def fill(batch):
            is_padding = np.pad(~batch["mask"], [(0, 0), (1, 0)])
            return batch | {"tokens": np.where(is_padding, filler, batch["tokens"])}

        monkeypatch.setattr(document_losses, "_track", lambda batches, label: map(fill, batches))
        return [way(model, params, mesh, documents, WINDOW, 2).nats for way in (measure_windows, measure_streaming)]

    expected = measure(EOT)
    assert expected[0].sum() > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), [measure(0), measure(97)], [expected] * 2)


def test_losses_are_added_where_their_tokens_stand(rng, tmp_path, monkeypatch):
    """By a model that answers with the stream's own tokens."""
    documents = draw_documents(rng, tmp_path / "split", [3, 40, 1, 22])
    stream = documents.dataset.read(0, documents.dataset.n_tokens)
    monkeypatch.setattr(document_losses, "window_losses", lambda model, params, tokens, *_: jnp.float32(tokens[:, 1:]))
    sums = measure_windows(model_config(), {}, make_mesh(), documents, WINDOW, 3)
    each = np.split(np.float64(stream), documents.starts[1:-1])
    np.testing.assert_array_equal(sums.nats.sum(1), [text.sum() for text in each])
    assert sums.context_tokens.sum() == len(stream) and sums.loss == pytest.approx(stream.mean(), rel=1e-12)


# ---- sums ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True])
def test_sums_are_by_document_and_range_of_positions(rng, tmp_path, forgets):
    documents = draw_documents(rng, tmp_path / "split", [1, 5, 70_000, *rng.integers(1, 90, 9)])
    sums, losses = filled(documents, rng, forgets=forgets)
    nats, tokens = np.zeros_like(sums.nats), np.zeros(sums.nats.shape, int)
    seen, far = np.zeros((2, N_RANGES)), np.zeros((2, len(documents)))
    index = 0
    for d, length in enumerate(documents.lengths):
        for position in range(1, length + 1):
            of = lambda position: min((position - 1).bit_length(), 17)
            context = index % WINDOW + 1
            context = min(context, position) if forgets else context
            nats[d, of(position)] += losses[index]
            tokens[d, of(position)] += 1
            seen[:, of(context)] += losses[index], 1
            far[:, d] += (losses[index], 1) if position > WINDOW and context >= WINDOW / 2 else 0
            index += 1
    np.testing.assert_allclose(sums.nats, nats, rtol=1e-6)
    np.testing.assert_array_equal(sums.tokens, tokens)
    np.testing.assert_allclose([sums.context_nats, sums.context_tokens], seen, rtol=1e-6)
    np.testing.assert_allclose([sums.far_nats, sums.far_tokens], far, rtol=1e-6)
    assert tokens[:, 17].sum() == 70_000 - 65536 and far[1].any()


# ---- estimates -------------------------------------------------------------------------------


def test_intervals_are_those_of_the_mean_of_many_documents(rng, tmp_path):
    """The loss of D equally long documents is a mean of D values: its interval is 1.96 deviations / sqrt(D)."""
    documents = draw_documents(rng, tmp_path / "split", [11] * 400)
    sums, losses = filled(documents, rng)
    result = estimate([(sums, 1.0)])
    assert (result.documents, result.tokens) == (400, 4400)
    assert result.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(losses.sum() / math.log(2) / 4000, rel=1e-6)
    half = 1.96 * losses.reshape(400, 11).mean(1).std() / 20
    np.testing.assert_allclose(result.loss_interval, [losses.mean() - half, losses.mean() + half], atol=0.2 * half)
    np.testing.assert_allclose(result.bits_per_byte_interval, np.array(result.loss_interval) * 1.1 / math.log(2))


def test_documents_and_not_tokens_are_drawn(rng, tmp_path):
    """Losses alike within each document: the interval is as wide as the documents' number says, not the tokens'."""
    documents = draw_documents(rng, tmp_path / "split", [1000] * 30)
    sums, own = DocumentLosses(documents, WINDOW, False), rng.standard_normal(30) + 5
    sums.add(np.arange(30_000), np.repeat(own, 1000))
    low, high = estimate([(sums, 1.0)]).loss_interval
    assert 0.5 < (high - low) / (2 * 1.96 * own.std() / math.sqrt(30)) < 1.5


def test_one_document_has_no_interval(rng, tmp_path):
    result = estimate([(filled(draw_documents(rng, tmp_path / "split", [50]), rng)[0], 1.0)])
    assert result.loss_interval is None and result.bits_per_byte_interval is None


def test_sources_are_estimated_alone_and_a_mixture_by_shares(rng, tmp_path):
    named = draw_documents(rng, tmp_path / "a", rng.integers(2, 50, 40), [*["x", "y", None, "x"] * 10])
    plain = draw_documents(rng, tmp_path / "b", [*rng.integers(2, 90, 30), 1])
    (one, losses), (other, other_losses) = filled(named, rng), filled(plain, rng, scale=3.0)
    parts = [(one, 0.3), (other, 0.7)]
    result = estimate(parts)
    assert result.loss == pytest.approx(0.3 * losses.mean() + 0.7 * other_losses.mean(), rel=1e-6)
    bytes_per_token = 0.3 * named.dataset.bytes_per_token + 0.7 * plain.dataset.bytes_per_token
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) / bytes_per_token, rel=1e-6)
    assert result.loss_interval[0] < result.loss < result.loss_interval[1]

    sources = estimate_sources([(one, 1.0)])
    each = np.split(losses, named.starts[1:-1])
    assert list(sources) == sorted(sources, key=lambda name: -sources[name].tokens) and len(sources) == 3
    for name, found in sources.items():
        own = [each[d] for d in range(40) if named.names[named.sources[d]] == name]
        nats, tokens = sum(map(np.sum, own)), sum(map(len, own))
        assert (found.documents, found.tokens) == (len(own), tokens)
        assert found.loss == pytest.approx(nats / tokens, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / (tokens - len(own)), rel=1e-6)
        assert found.loss_interval[0] < found.loss < found.loss_interval[1]
    assert estimate_sources(parts)["x"].loss == pytest.approx(sources["x"].loss, rel=1e-9)
    assert estimate_sources(parts)[None].documents == sources[None].documents + 31
    assert estimate_sources([(other, 1.0)]) is None


def test_empty_documents_have_no_bits_per_byte(rng, tmp_path):
    documents = draw_documents(rng, tmp_path / "split", [1, 5, 1, 1], ["x", "y", "x", "x"])
    result = estimate_sources([(filled(documents, rng)[0], 1.0)])["x"]
    assert result.tokens == 3 and result.bits_per_byte is None and result.bits_per_byte_interval is None


# ---- positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "verdict"), [(-0.5, "helps"), (0.5, "hurts"), (0.0, "makes no significant difference")]
)
def test_positions_and_what_a_long_context_brings(rng, tmp_path, gain, verdict):
    """Losses that are lower by `gain` beyond the window, and as before within it."""
    documents = draw_documents(rng, tmp_path / "split", rng.permutation([3, 16, *rng.integers(40, 200, 60)]))
    windows, losses = filled(documents, rng)
    positions = np.concatenate([np.arange(1, n + 1) for n in documents.lengths])
    streamed = losses + np.where(positions > WINDOW, gain, 0) + 0.1 * rng.standard_normal(len(losses)) * (gain == 0)
    streaming = DocumentLosses(documents, WINDOW, False)
    streaming.add(np.arange(len(losses)), streamed)
    result = compare_positions([(windows, 1.0)], [(streaming, 1.0)])
    assert [(r.first, r.last) for r in result.ranges][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert sum(r.tokens for r in result.ranges) == len(losses) == sum(c.tokens for c in result.contexts)
    assert result.contexts[-1].last == WINDOW == result.window
    for r in result.ranges:
        chosen = (positions >= r.first) & (positions <= r.last)
        assert r.tokens == chosen.sum()
        assert (r.windows, r.streaming) == pytest.approx((losses[chosen].mean(), streamed[chosen].mean()), rel=1e-5)
        assert r.difference == pytest.approx(r.streaming - r.windows, abs=1e-9)
        if gain:
            np.testing.assert_allclose(r.difference_interval, gain * (r.first > WINDOW), atol=1e-5)
        assert r.streaming_interval[0] <= r.streaming <= r.streaming_interval[1]
    far = result.far
    assert 0 < far.tokens < np.sum(positions > WINDOW) and far.difference == pytest.approx(gain, abs=0.05)
    assert far.verdict == verdict or (gain == 0 and abs(far.difference) > 0.003)

    path = tmp_path / "plots" / "positions.png"
    plot_positions(result, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-2.0, -1.0), "helps"),
        ((1.0, 2.0), "hurts"),
        ((-1.0, 0.0), "makes no significant difference"),
        ((0.0, 1.0), "makes no significant difference"),
        (None, "makes no significant difference"),
    ],
)
def test_a_difference_is_one_where_its_interval_excludes_0(interval, verdict):
    difference = -1.0 if interval is None else sum(interval) / 2
    intervals = dict(windows_interval=None, streaming_interval=None, difference_interval=interval)
    found = Comparison(tokens=9, windows=2.0, streaming=2.0 + difference, difference=difference, **intervals)
    assert found.verdict == verdict


def test_without_long_documents_nothing_is_said_of_long_contexts(rng, tmp_path):
    documents = draw_documents(rng, tmp_path / "split", [5, 16])
    sums, _ = filled(documents, rng)
    result = compare_positions([(sums, 1.0)], [(sums, 1.0)])
    assert result.far is None and [r.last for r in result.ranges] == [1, 2, 4, 8, 16]
    assert result.ranges[-1].difference_interval is None, "a single document"


def test_the_table_of_positions_has_contexts_that_no_document_is_long_enough_for():
    """In windows over several documents a token sees more tokens than its own document has before it."""
    found = PositionLosses(window=4, ranges=[], contexts=[Context(2, 3, tokens=5, loss=1.25)], far=None)
    assert ["2-3", "1.2500"] in [line.split() for line in format_positions(found).splitlines()]
