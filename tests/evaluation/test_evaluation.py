"""Evaluation against a float64 computation from the logits of every window, and eval.py against both."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import EvaluationBatches
from heinsen.evaluation.loss import bits_per_byte, evaluate, make_eval_step, perplexity
from heinsen.models import forward
from heinsen.parallel import make_mesh
from heinsen.weights import load_params
from tests.evaluation.test_document_losses import read_alone
from tests.runs import BATCH, EOT, LENGTH, STEPS, draw_text, run_config, snapshot, write_split

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def model(data):
    return run_config(data).model


@pytest.fixture(scope="module")
def params(run, model):
    return load_params(run.workdir, model, make_mesh())[1]


@pytest.fixture(scope="module")
def dataset(data) -> TokenDataset:
    dataset = TokenDataset(data / "validation")
    # The last window, row and batch are all incomplete.
    assert dataset.n_tokens % LENGTH and -(-dataset.n_tokens // LENGTH) % BATCH
    return dataset


def direct_nats(model, params, tokens: np.ndarray) -> np.ndarray:
    """-log p of every token of a split, by the definition: windows of T predictions, each seeing T tokens at most."""
    stream = np.concatenate([[EOT], tokens]).astype(np.int32)
    windows = [stream[start : start + LENGTH + 1] for start in range(0, len(tokens), LENGTH)]
    inputs = np.zeros((len(windows), LENGTH), np.int32)
    for row, window in zip(inputs, windows, strict=True):
        row[: len(window) - 1] = window[:-1]
    logits = np.asarray(jax.jit(forward, static_argnums=0)(model, params, inputs)[0], np.float64)
    top = logits.max(-1, keepdims=True)
    log_probabilities = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.concatenate(
        [-log_probabilities[row, np.arange(len(window) - 1), window[1:]] for row, window in enumerate(windows)]
    )


@pytest.fixture(scope="module")
def nats(model, params, dataset) -> np.ndarray:
    nats = direct_nats(model, params, dataset.read(0, dataset.n_tokens))
    assert nats.shape == (dataset.n_tokens,) and np.ptp(nats) > 1
    return nats


@pytest.fixture(scope="module")
def measure(model, params, dataset):
    """measure(batch_size, max_tokens) -> the number of batches, and the result."""
    mesh = make_mesh()
    step = make_eval_step(model, mesh)

    def measure(batch_size=BATCH, max_tokens=None):
        batches = EvaluationBatches(dataset, LENGTH, batch_size, max_tokens=max_tokens)
        return len(batches), evaluate(step, params, batches, mesh)

    return measure


def test_loss_is_the_mean_over_every_token_of_the_split_and_bytes_are_of_its_text(measure, dataset, nats):
    _, result = measure()
    assert result.tokens == result.split_tokens == dataset.n_tokens
    assert result.extent == f"all {dataset.n_tokens} tokens"
    assert result.loss == pytest.approx(nats.mean(), rel=1e-6)
    text_bytes = int(np.sum(dataset.read(0, dataset.n_tokens) != EOT))
    assert text_bytes < dataset.n_tokens
    assert result.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / text_bytes, rel=1e-6)
    assert bits_per_byte(2.47, 4.0) == pytest.approx(2.47 * math.log2(math.e) / 4, rel=1e-12)


def test_batch_size_does_not_change_the_result(measure):
    n_batches, result = measure()
    other_n_batches, other = measure(batch_size=7)
    assert n_batches != other_n_batches
    assert other.tokens == result.tokens
    assert other.loss == pytest.approx(result.loss, rel=1e-6)


def test_max_tokens_takes_the_first_ones_in_the_middle_of_a_window_too(measure, nats):
    for max_tokens in (100, 5):
        assert max_tokens % LENGTH
        _, result = measure(max_tokens=max_tokens)
        assert result.tokens == max_tokens
        assert result.extent == f"the first {max_tokens} of {len(nats)} tokens"
        assert result.loss == pytest.approx(nats[:max_tokens].mean(), rel=1e-6)


def test_sums_are_float64_and_over_the_masked_targets(dataset):
    """A step that returns given sums, which float32 would lose."""
    sums = iter([np.array([2.0**24, 1.0], np.float32), np.array([1.0, 1.0], np.float32)])
    batches = EvaluationBatches(dataset, 3, 2, max_tokens=8)
    result = evaluate(lambda params, batch: next(sums), {}, batches, make_mesh())
    assert result.tokens == 8 and next(sums, None) is None
    assert result.loss == (2**24 + 3) / 8
    assert result.bits_per_byte == bits_per_byte(result.loss, dataset.n_bytes / dataset.n_tokens)
    assert 1e300 < perplexity(result.loss) < math.inf, "a hopeless model has a large perplexity, and no overflow"


# ---- eval.py ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_data(tmp_path_factory) -> Path:
    """Of three documents and more, which name their sources in turn."""
    folder = tmp_path_factory.mktemp("other")
    text = draw_text(np.random.default_rng(1), 150)
    text[[30, 90]] = EOT
    names = ["books", "web", None] * 9
    write_split(folder / "test", text, sources=[names[: np.sum(text == EOT)]], n_lost=7)
    return folder


@pytest.fixture(scope="module")
def plot(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plots") / "new" / "positions.png"


@pytest.fixture(scope="module")
def reports(run, other_data, plot, commands):
    """What eval.py prints: as it is, of other data, and by position on devices that do not divide the batch."""
    before = snapshot(run.workdir)
    command = ["eval.py", f"--workdir={run.workdir}"]
    done = {
        "own": commands.run(*command),
        "other": commands.fork(*command, "--split=test", f"--config.data.path={other_data}"),
        "three devices": commands.fork(*command, f"--by_position={plot}", devices=3),
    }
    assert snapshot(run.workdir) == before, "evaluation leaves the run as it is"
    for process in done.values():
        assert process.returncode == 0, process.stderr
    return {name: process.stdout.splitlines() for name, process in done.items()}


def test_last_line_of_eval_is_the_result_in_json(reports, run, measure, dataset):
    assert BATCH % 3
    keys = {"workdir", "step", "split", "mode", "documents", "tokens", "bytes"}
    keys |= {"loss", "loss_interval", "perplexity", "bits_per_byte", "bits_per_byte_interval"}
    _, expected = measure()
    for name in ("own", "three devices"):
        result = json.loads(reports[name][-1])
        assert result.keys() == keys | ({"by_position"} if name == "three devices" else set())
        assert (result["workdir"], result["step"], result["split"]) == (str(run.workdir), STEPS, "validation")
        assert (result["tokens"], result["bytes"]) == (dataset.n_tokens, dataset.n_bytes)
        assert result["documents"] == dataset.n_documents
        assert result["mode"] == "windows"
        assert result["loss_interval"][0] < result["loss"] < result["loss_interval"][1]
        for field in ("loss", "bits_per_byte"):
            assert result[field] == pytest.approx(getattr(expected, field), rel=1e-5), (name, field)
        assert result["perplexity"] == pytest.approx(math.exp(expected.loss), rel=1e-5)


def test_lines_before_it_are_the_same_for_the_eye(reports):
    result = json.loads(reports["own"][-1])
    table = "\n".join(reports["own"][:-1])
    for text in (
        f"step {STEPS}",
        f"validation: all {result['tokens']} tokens, ",
        f"{result['loss']:.4f}",
        f"{result['perplexity']:.3f}",
        f"{result['bits_per_byte']:.4f}",
    ):
        assert text in table


def test_another_split_of_other_data_can_be_evaluated(reports, other_data, model, params):
    result = json.loads(reports["other"][-1])
    tokens = TokenDataset(other_data / "test").read(0, 150)
    assert (result["split"], result["tokens"]) == ("test", 150)
    assert result["loss"] == pytest.approx(direct_nats(model, params, tokens).mean(), rel=1e-5)
    assert result["loss"] != json.loads(reports["own"][-1])["loss"]
    table = "\n".join(reports["other"][:-1])
    assert result["lost_bytes"] == 7 and "lost text      7 bytes that the tokenizer cannot spell" in table
    assert result["sources"].keys() == {"books", "web", "(none named)"}
    assert sum(source["tokens"] for source in result["sources"].values()) == 150
    for name, source in result["sources"].items():
        assert name in table and f"{source['loss']:.4f}" in table
    nats, ends = direct_nats(model, params, tokens), np.flatnonzero(tokens == EOT) + 1
    books = np.concatenate(np.split(nats, ends[:-1])[::3])
    assert result["sources"]["books"]["loss"] == pytest.approx(books.mean(), rel=1e-5)


def test_by_position_compares_windows_and_streaming(reports, plot, model, params, dataset):
    """Streaming on three devices too is every document alone and whole."""
    table, found = "\n".join(reports["three devices"][:-1]), json.loads(reports["three devices"][-1])["by_position"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    nats, lengths = read_alone(model, params, dataset.read(0, dataset.n_tokens))
    position = np.arange(1, lengths.max() + 1)
    for r in found["ranges"]:
        own = (position >= r["first"]) & (position <= r["last"]) & (position <= lengths[:, None])
        assert r["tokens"] == own.sum() and r["streaming"] == pytest.approx(nats[own].mean(), rel=1e-4)
        assert f"{r['streaming']:.4f}" in table
    assert sum(r["tokens"] for r in found["ranges"]) == dataset.n_tokens
    assert found["window"] == LENGTH and found["far"]["tokens"] > 0
    assert f"A context beyond {LENGTH} tokens" in table
