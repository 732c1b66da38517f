"""Experiments that consist of cells: which are run and kept, what repeats in a text, and the report on some of them."""

import json
from functools import partial

import numpy as np
import pytest

from experiments import lanes
from experiments.attribution import config, report, text
from experiments.attribution import run as attribution
from experiments.recall_by_state import run as recall
from experiments.tools import ExperimentError
from heinsen.models import abstract_params, count_params

CELLS = {"a": 1, "b, c": 2, "d": 3}


def measure(cell, turn):
    with turn:
        if cell == 3:
            raise ValueError("fails")
        return {"summary": f"found {cell}", "tuning": {"0.5": cell}}


def test_cells_are_kept_and_others_named(tmp_path, capsys):
    found = lanes.run_cells(CELLS, measure, tmp_path, None, ["1"])
    assert found["missing"] == ["b, c", "d"] and found["cells"]["a"]["tuning"] == {0.5: 1}
    found = lanes.run_cells(CELLS, None, tmp_path, 0.0, None)  # no time, so nothing is measured
    assert list(found["cells"]) == ["a"]
    found = lanes.run_cells(CELLS, measure, tmp_path, None, None)
    assert list(found["cells"]) == ["a", "b, c"] and found["missing"] == ["d"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "results.json").write_text(json.dumps(found))
    assert lanes.run_cells(CELLS, None, tmp_path / "elsewhere", 0.0, None) == found
    assert "d: ValueError: fails" in capsys.readouterr().err


def test_cells_run_in_the_order_of_their_numbers(tmp_path):
    seen = []
    lanes.run_cells(CELLS, lambda cell, turn: seen.append(cell) or measure(cell, turn), tmp_path, None, ["2", "1"])
    assert seen == [2, 1]


@pytest.mark.parametrize("numbers, message", [(["0"], "--cells=0: there are cells 1 to 3"), (["x", "1"], "--cells=x:")])
def test_cells_that_are_not_there(numbers, message, tmp_path):
    with pytest.raises(ExperimentError, match=message):
        lanes.run_cells(CELLS, measure, tmp_path, None, numbers)


def test_no_cell_is_done(tmp_path):
    with pytest.raises(ExperimentError, match="no cell is done"):
        lanes.run_cells(CELLS, measure, tmp_path, None, ["3"])


def test_results_of_another_size_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"size": "0.5M"}')
    with pytest.raises(ExperimentError, match=r"has results of --size=0\.5M: give --size=2M an --out of its own"):
        attribution.measure(attribution.Plan(), tmp_path / "corpus", tmp_path, None, None)


def test_cells_have_as_many_parameters_as_each_other():
    rng, count = np.random.default_rng(), lambda config: count_params(abstract_params(config.model))
    for cells, train_config in (
        *((list(config.CELLS.values()), partial(attribution.train_config, size=size)) for size in config.SIZES),
        (list(recall.config.EQUAL.values()), recall.train_config),
    ):
        counts = [count(train_config(cells[i])) for i in rng.choice(len(cells), 3, replace=False)]
        assert max(counts) < 1.021 * min(counts)


def test_recalled_tokens_are_those_of_a_search():
    rng = np.random.default_rng()
    train, windows = rng.integers(2, size=(2, 5, 2, 40)), rng.integers(2, size=(4, 30))
    lengths, n, most = np.array([29, 29, 29, 12]), 4, 46
    grams = lambda row: [tuple(row[i - n + 1 : i + 1]) for i in range(n - 1, len(row))]
    in_training = [gram for row in train.reshape(-1, 40) for gram in grams(row)]
    want = []
    for row, length in zip(windows, lengths, strict=True):
        own = [None] * (n - 1) + grams(row)
        seen = [own[i] is not None and own[i] in own[:i] and in_training.count(own[i]) <= most for i in range(30)]
        want += seen[1 : length + 1]
    found = text.find_recalled(windows, lengths, train, n, most)
    assert found.tolist() == want and 0 < sum(want) < len(want)


def test_the_report_on_some_cells():
    rng = np.random.default_rng()
    cell = lambda base: dict(
        machine="a chip", jax="0", seconds=3.0, seeds=[1, 2], parameters=7, state_numbers=8, learning_rate=0.5,
        document_nats=(base + rng.random((2, 5))).tolist(), recalled_nats=[[2.0], [4.0]], tuning={0.5: 1.0, 1.0: 2.0},
    )  # fmt: skip
    results = dict(
        cells={"one": cell(8.0), "two": cell(9.0)}, missing=["three"], size="1M", steps=2, n_grams=[4], recalled=[10],
        settings=dict(batch_size=3, sequence_length=4), documents=dict(num_bytes=[10.0] * 5),
    )  # fmt: skip
    lines = report.report(results)
    assert "Not run yet: three." in lines and any("a chip" in line for line in lines)
    ours = np.array(results["cells"]["two"]["document_nats"]) - np.array(results["cells"]["one"]["document_nats"])
    want = ours.sum() / 2 / np.log(2) / 50
    (row,) = (line for line in lines if line.startswith("| two |") and "[" in line)
    assert f"{want:+.4f} [" in row and row.endswith("| 7 | 8 | 0.5 | 0.300 |")
    low, high = (float(x) for x in row.split("[")[1].split("]")[0].split(","))
    assert low < want < high and low > 0
    assert len(report.draw(results).axes) == 1
