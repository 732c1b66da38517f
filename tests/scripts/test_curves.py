"""Curves and final figures of runs, and the bands of loss to expect."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from heinsen.figures import smooth
from heinsen.training.folder import RunError
from scripts.curves import (
    Anchor,
    CurveError,
    RunLog,
    bands_and_points,
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
    weights = [[weight ** (t - s) if s <= t else 0.0 for s in range(50)] for t in range(50)]
    expected = np.average(np.tile(values, (50, 1)), axis=1, weights=np.array(weights) + 0.0)
    np.testing.assert_allclose(smooth(values, weight), expected, rtol=1e-10)


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
    with pytest.raises(CurveError, match="has logged nothing yet"):
        RunLog.read(tmp_path)
    config = json.loads((run.workdir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"seed": "one"}))
    with pytest.raises(RunError, match="config.seed"):
        RunLog.read(tmp_path)


# ---- anchors -------------------------------------------------------------------------------------


def test_the_anchors_hold_the_published_figures_and_name_their_sources():
    bands, points = bands_and_points(read_anchors(ANCHORS))
    assert [(point.tokens, point.low, point.label.split()[0]) for point in points] == [(10e9, 2.7, "goom_ssm_rnn")]
    anchors = {anchor.tokens: anchor for anchor in bands}
    assert list(anchors) == [1e9, 5e9, 10e9, 15e9, 50e9, 100e9, 300e9]
    assert [anchors[n * 1e9].low for n in (5, 10, 15)] == [2.588, 2.477, 2.416]
    assert anchors[300e9].low < 2.47 < anchors[300e9].high
    for anchor in anchors.values():
        assert "paper" in anchor.source
        assert ("derived" in anchor.source.split(";")[0]) == (anchor.tokens not in (5e9, 10e9, 15e9))
    losses = [(anchor.low, anchor.high) for anchor in anchors.values()]
    assert all(a > c and b > d for (a, b), (c, d) in zip(losses, losses[1:], strict=False)), "losses fall"


def test_derived_anchors_follow_from_the_published_figures():
    """low = E + B n^-b through the three figures (n in 1e9 tokens); high = 1.01 x 2.47 (300 / n)^c, c their slope."""
    low, slope = {5: 2.588, 10: 2.477, 15: 2.416}, math.log(2.588 / 2.416) / math.log(3)
    powers = np.linspace(0.01, 0.5, 100_000)
    ratio = (5**-powers - 10**-powers) / (10**-powers - 15**-powers)
    b = powers[np.abs(ratio - (low[5] - low[10]) / (low[10] - low[15])).argmin()]
    scale = (low[5] - low[10]) / (5**-b - 10**-b)
    for anchor in bands_and_points(read_anchors(ANCHORS))[0]:
        n = anchor.tokens / 1e9
        assert abs(anchor.low - (low[5] + scale * (n**-b - 5**-b))) < 2e-3
        assert abs(anchor.high - 1.01 * 2.47 * (300 / n) ** slope) < 2e-3


def test_runs_are_judged_between_and_at_the_anchors(tmp_path):
    path = tmp_path / "bands.csv"
    path.write_text("tokens,low,high,source\n1e2,4,5,a\n1e4,2,3,b\n")
    anchors = read_anchors(path)
    judge = lambda tokens, losses: compare_with_anchors(anchors, np.array(tokens), np.array(losses))
    assert judge([10, 50], [9.0, 8.0]) == ["not yet at the first anchor, 100 tokens"]
    assert judge([10, 1000], [6.5, 4.5]) == [
        "100 tokens: 5.500, ABOVE 4.000 to 5.000",
        "1e+03 tokens: 4.500, ABOVE 3.000 to 4.000",
    ]
    assert judge([100, 1e4], [4.5, 1.9]) == [
        "100 tokens: 4.500, within 4.000 to 5.000",
        "1e+04 tokens: 1.900, BELOW 2.000 to 3.000",
    ]
    assert judge([100, 1e6], [4.5, 0.5])[1:] == ["1e+04 tokens: 2.500, within 2.000 to 3.000"], (
        "beyond: nothing is known"
    )
    path.write_text("tokens,low,high,source,label\n1e2,4,5,a,\n1e3,3.5,3.5,c,theirs\n1e4,2,3,b,\n")
    anchors = read_anchors(path)
    assert judge([10, 500], [6.0, 5.0])[2:] == [], "not yet at the point"
    assert judge([10, 1e5], [6.5, 2.5])[2:] == ["1e+03 tokens: 4.500, 1.000 above 3.5, theirs"]
    assert judge([10, 1e5], [3.5, 1.5])[2:] == ["1e+03 tokens: 2.500, 1.000 below 3.5, theirs"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("tokens,low\n1,2\n", "expected columns"),
        ("tokens,low,high,source\n1,x,2,a\n", "expected columns"),
        ("tokens,low,high,source\n", "expected rows"),
        ("tokens,low,high,source\n1,3,2,a\n", "expected rows"),
        ("tokens,low,high,source\n2,1,2,a\n1,1,2,a\n", "expected rows"),
        ("tokens,low,high,source,label\n1,1,1,a,theirs\n", "expected rows"),
        ("tokens,low,high,source,label\n1,1,2,a,\n2,1,2,b,theirs\n", "'theirs' has a label, .* low = high"),
        (None, "cannot be read"),
    ],
)
def test_bad_anchors_are_named(tmp_path, text, message):
    path: Path = tmp_path / "bands.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CurveError, match=message):
        read_anchors(path)


def test_anchors_say_what_tokens_they_count(tmp_path):
    path = tmp_path / "bands.csv"
    for column, row, tokenizer in (("", "", "gpt2"), (",tokenizer", ",bytes", "bytes"), (",tokenizer", ",", "gpt2")):
        path.write_text(f"tokens,low,high,source{column}\n1,1,2,a{row}\n")
        assert read_anchors(path) == [Anchor(1.0, 1.0, 2.0, "a", tokenizer)]


def test_the_anchors_are_plain_csv():
    with ANCHORS.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["tokens", "low", "high", "source", "label"] and all(len(row) == 5 for row in rows)
