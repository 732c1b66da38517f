"""Curves and final figures of runs, and published losses to compare them with."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from heinsen.errors import InputError
from heinsen.figures import smooth
from heinsen.training.folder import RunError
from scripts.curves import (
    Anchor,
    RunLog,
    compare_with_anchors,
    final_table,
    make_curve,
    read_anchors,
)
from tests.runs import BATCH, LENGTH, ROOT

pytest_plugins = ["tests.run_fixtures"]

ANCHORS = ROOT / "docs" / "anchors.csv"


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.97])
def test_smoothing_is_the_weighted_mean_of_what_came_before(rng, weight):
    values = rng.normal(size=50)
    w = min(weight, 1 - 20 / 50)
    weights = [[w ** (t - s) if s <= t else 0.0 for s in range(50)] for t in range(50)]
    expected = np.average(np.tile(values, (50, 1)), axis=1, weights=np.array(weights) + 0.0)
    np.testing.assert_allclose(smooth(values, weight), expected, rtol=1e-10)


@pytest.mark.parametrize("n", [1, 15, 300])
def test_a_smoothed_curve_of_any_length_is_less_than_a_fifteenth_late(n):
    values = 2 + 4 * np.exp(-np.linspace(0, 3, n))
    late = max(1, n // 15)
    assert np.all(smooth(values, 0.9)[late:] < values[:-late])


def test_a_figure_of_runs_names_the_dots_of_validations(run, commands, tmp_path):
    out = tmp_path / "loss.svg"
    assert commands.fork("scripts/plot_runs.py", run.workdir, f"--out={out}", "--smooth=0.9").returncode == 0
    assert "<!-- validation -->" in out.read_text(), "a label"


def test_axes_measure_the_same_run(run):
    log = RunLog.read(run.workdir)
    entries = [entry for entry in run.log if "loss" in entry]
    tokens, losses = make_curve(log, "loss", "tokens")
    np.testing.assert_array_equal(tokens, [entry["step"] * BATCH * LENGTH for entry in entries])
    np.testing.assert_array_equal(losses, [entry["loss"] for entry in entries])
    steps, smoothed = make_curve(log, "loss", "steps", 0.5)
    np.testing.assert_array_equal(steps, [entry["step"] for entry in entries])
    np.testing.assert_array_equal(smoothed, smooth(losses, 0.5))
    at, validations = make_curve(log, "validation_loss", "steps")
    assert dict(zip(at, validations, strict=True)) == {
        entry["step"]: entry["validation_loss"] for entry in run.log if "validation_loss" in entry
    }
    hours = make_curve(log, "loss", "time")[0] * 3600
    seconds = np.cumsum([BATCH * LENGTH / entry["tokens_per_second"] for entry in entries])
    np.testing.assert_allclose(hours, seconds, rtol=1e-9)
    # Embedding, position, two layers of LayerNorm, W1, W2 and W3, the last LayerNorm (heinsen/models, tests/runs.py).
    n_params = 264 * 32 + (32 + 1) * 64 + 2 * (2 * 32 + (32 + 1) * 24 + (8 + 1) * 64 + 32 * 32) + 2 * 32
    np.testing.assert_allclose(make_curve(log, "loss", "flops")[0], 6.0 * n_params * tokens)


def test_the_table_holds_the_last_figures(run):
    _, row = final_table([RunLog.read(run.workdir)])
    last = {name: x for entry in run.log for name, x in entry.items()}
    for text in (f"{last['validation_loss']:.4f}", f"{last['validation_bits_per_byte']:.4f}", f"{last['loss']:.4f}"):
        assert text in row.split()
    assert f"{last['tokens']:,}" in row.split()


def test_what_cannot_be_drawn_is_named(run, tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        RunLog.read(tmp_path)
    (tmp_path / "config.json").write_text((run.workdir / "config.json").read_text())
    with pytest.raises(InputError, match="has logged nothing yet"):
        RunLog.read(tmp_path)
    config = json.loads((run.workdir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"seed": "one"}))
    with pytest.raises(RunError, match="config.seed"):
        RunLog.read(tmp_path)


# ---- anchors -------------------------------------------------------------------------------------


def test_the_anchors_hold_the_published_figures_and_name_their_sources():
    anchors = read_anchors(ANCHORS)
    assert all("arXiv:" in anchor.source or "github.com" in anchor.source for anchor in anchors)
    perplexities = {5e9: 13.3, 10e9: 11.9, 15e9: 11.2}
    hyena = {anchor.tokens: anchor.loss for anchor in anchors if anchor.label == "GPT 125M, softmax"}
    assert hyena == {tokens: round(math.log(x), 3) for tokens, x in perplexities.items()}
    rest = [(anchor.tokens, anchor.loss) for anchor in anchors if anchor.label != "GPT 125M, softmax"]
    assert rest == [(2.22e9, 2.566), (10e9, 2.7), (300e9, 2.47)]


def test_runs_are_compared_with_the_anchors_that_they_have_passed(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text("tokens,loss,label,source\n1e2,4,a,b\n1e4,2.566,c,d\n")
    anchors = read_anchors(path)
    compare = lambda tokens, losses: compare_with_anchors(anchors, np.array(tokens), np.array(losses))
    assert compare([10, 1000], [6.5, 4.5]) == ["100 tokens: 5.500, 1.500 above 4, a"]
    assert compare([1000, 1e5], [3.5, 1.5]) == ["1e+04 tokens: 2.500, 0.066 below 2.566, c"]
    for none in ([[10, 50], [9.0, 8.0]], [[], []], [[1e5], [2.0]]):
        assert compare(*none) == ["no validation at an anchor yet: the first is 100 tokens"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("tokens,loss\n1,2\n", "expected columns tokens, loss, label, source"),
        ("tokens,loss,label,source\n1,x,a,b\n", "expected columns"),
        ("tokens,low,high,source\n1,2,3,a\n", "expected columns tokens, loss, label, source"),  # bands, of before
        ("tokens,loss,label,source\n", "expected rows"),
        ("tokens,loss,label,source\n1,0,a,b\n", "expected rows"),
        ("tokens,loss,label,source\n1,nan,a,b\n", "expected rows"),
        (None, "cannot be read"),
    ],
)
def test_bad_anchors_are_named(tmp_path, text, message):
    path: Path = tmp_path / "published.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_anchors(path)


def test_anchors_say_what_tokens_they_count(tmp_path):
    path = tmp_path / "published.csv"
    for column, row, tokenizer in (("", "", "gpt2"), (",tokenizer", ",bytes", "bytes"), (",tokenizer", ",", "gpt2")):
        path.write_text(f"tokens,loss,label,source{column}\n1,2,a,b{row}\n")
        assert read_anchors(path) == [Anchor(1.0, 2.0, "a", "b", tokenizer)]


def test_the_anchors_are_plain_csv():
    with ANCHORS.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["tokens", "loss", "label", "source"] and all(len(row) == 4 for row in rows)
