"""Experiments that consist of cells: which are run and kept, what repeats in a text, and the report on some of them."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import lanes, reports, tools
from experiments.attribution import config, report, text
from experiments.attribution import run as attribution
from experiments.conversion import config as conversion_config
from experiments.conversion import mix
from experiments.conversion import report as conversion_report
from experiments.conversion import run as conversion
from experiments.copying import run as copying
from experiments.long_contexts import report as contexts_report
from experiments.long_contexts import run as contexts
from experiments.recall_by_state import run as recall
from experiments.scaling import report as scaling_report
from experiments.scaling import run as scaling
from experiments.scaling.law import Law, on_bound
from heinsen.errors import InputError
from heinsen.models import abstract_params, count_params, init_params, next_token_losses
from tests.model_configs import model_config

pytest_plugins = ["tests.run_fixtures"]

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


def test_the_plan_says_how_long_cells_take(tmp_path):
    assert "no cell that tells how long" in tools.list_cells(list(CELLS), tmp_path)[-1]
    (tmp_path / "results.json").write_text('{"cells": {"a": {"seconds": 3600}}}')
    lanes.run_cells(CELLS, lambda cell, turn: measure(cell, turn) | {"seconds": 7200}, tmp_path, None, ["2"])
    lines = tools.list_cells(list(CELLS), tmp_path)
    assert lines[:3] == [" 1  a: 1.00 hours", " 2  b, c: 2.00 hours", " 3  d: to do"]
    assert lines[3] == "3.0 hours for 2 of 3; about 1.5 for the others"


@pytest.mark.parametrize("numbers, message", [(["0"], "--cells=0: there are cells 1 to 3"), (["x", "1"], "--cells=x:")])
def test_cells_that_are_not_there(numbers, message, tmp_path):
    with pytest.raises(InputError, match=message):
        lanes.run_cells(CELLS, measure, tmp_path, None, numbers)


def test_no_cell_is_done(tmp_path):
    with pytest.raises(InputError, match="no cell is done"):
        lanes.run_cells(CELLS, measure, tmp_path, None, ["3"])


def test_results_of_another_size_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"size": "0.5M"}')
    with pytest.raises(InputError, match=r"has results of --size=0\.5M: give --size=2M an --out of its own"):
        attribution.measure(attribution.Plan(), tmp_path / "corpus", tmp_path, None, None)


def test_cells_have_as_many_parameters_as_each_other():
    rng, count = np.random.default_rng(), lambda config: count_params(abstract_params(config.model))
    for cells, train_config in (
        *((list(config.CELLS.values()), partial(attribution.train_config, size=size)) for size in config.SIZES),
        (list(recall.config.EQUAL.values()), recall.train_config),
        *(
            ([cell for cell in scaling.config.CELLS.values() if cell.width == width], scaling.train_config)
            for width in scaling.config.WIDTHS
        ),
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


@pytest.mark.long
def test_a_cell_from_its_plan_to_its_report(tmp_path):
    plan = recall.SMALL_PLAN._replace(n_steps=40, n_tests=4)
    tools.execute(tmp_path, recall.report, lambda: recall.measure(plan, tmp_path, None, None))
    found = reports.read_results(tmp_path / "results.json")["cells"]
    assert list(found) == list(plan.cells)
    for cell in found.values():
        assert cell["learning_rate"] in cell["tuning"] and [run["seed"] for run in cell["runs"]] == [1, 2, 3]
        for run in cell["runs"]:
            assert len(run["right"]) == len(recall.PAIRS) and all(0 <= x <= 1 for x in run["right"])
    report = (tmp_path / "report.md").read_text()
    assert "nan" not in report and "(recall.png)" in report and (tmp_path / "recall.png").stat().st_size > 10_000
    tools.execute(tmp_path, recall.report, None)
    assert (tmp_path / "report.md").read_text() == report


def test_the_report_on_some_cells():
    rng = np.random.default_rng()
    cell = lambda base: dict(
        machine="a chip", jax="0", seconds=3.0, seeds=[1, 2], parameters=7, state_numbers=8, learning_rate=0.5,
        document_nats=(base + rng.random((2, 5))).tolist(), recalled_nats=[[2.0], [4.0]], tuning={0.5: 1.0, 1.0: 2.0},
        training=[[5.0, 4.0, 3.0, 2.0]] * 2,
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
    want = reports.seed_interval(ours.sum(1) / np.log(2) / 50)
    assert f"[{want.low:+.4f}, {want.high:+.4f}]" in row and "all differences of this table (1)" in "\n".join(lines)
    assert len(report.draw(results).axes) == 1
    (onset,) = report.draw_onset(results).axes
    assert [len(line.get_xdata()) for line in onset.lines] == [3] * 4


def test_recall_is_compared_by_seed_with_the_cell_that_differs_in_one_thing():
    seeds = {"exponential, width 256, 64 sequences": (0, 1, 2)}
    right = {
        "exponential, 4 x 16 x 16": 0.9, "linear, 4 x 16 x 16": 0.5, "exponential, 1 x 16 x 16": 0.4,
        "linear, 1 x 16 x 16": 0.3, "exponential, real values": 0.8, "exponential, real values, 1 x 16 x 16": 0.1,
        "linear, default gate": 0.25, "delta rule, 8,000 steps": 0.7, "exponential, width 256, 64 sequences": 1.0,
    }  # fmt: skip
    runs = lambda name, x: [dict(seed=seed, right=[1.0, x + seed / 100]) for seed in seeds.get(name, (1, 2, 3))]
    results = dict(cells={name: dict(runs=runs(name, x)) for name, x in right.items()}, pairs=[4, 32])
    found = recall.report.differences(results)
    assert {key: round(float(x.mean()), 3) for key, x in found.items()} == {
        ("linear, 4 x 16 x 16", "exponential, 4 x 16 x 16"): -0.4,
        ("linear, 1 x 16 x 16", "exponential, 1 x 16 x 16"): -0.1,
        ("exponential, real values", "exponential, 4 x 16 x 16"): -0.1,
        ("exponential, real values", "linear, 4 x 16 x 16"): 0.3,
        ("exponential, real values, 1 x 16 x 16", "linear, 1 x 16 x 16"): -0.2,
        ("exponential, real values, 1 x 16 x 16", "exponential, 1 x 16 x 16"): -0.3,
        ("linear, default gate", "linear, 4 x 16 x 16"): -0.25,
    }
    (line,) = (x for x in recall.report.differences_section(results) if x.startswith("| linear, default gate |"))
    assert line == "| linear, default gate | linear, 4 x 16 x 16 | -25.0% [-25.0%, -25.0%]* |"


def test_the_report_on_copying(rng):
    cell = lambda meanwhile: dict(
        machine="a chip", jax="0", seconds=90.0, seeds=[0, 1], parameters=7, recalled_meanwhile=meanwhile,
        recalled=[3.0, 3.5], bits_per_byte=rng.random(2).tolist(),
    )  # fmt: skip
    cells = {"a": cell([[5.0, 3.1, 3.3], [5.0, 4.0, 3.5]]), "b": cell([[3.1, 3.0, 2.0], [5.0, 4.0, 3.19]])}
    settings = dict(sequence_length=1000, bytes_per_step=4000, learning_rate=2e-3)
    results = dict(settings, steps=600, every=200, threshold=3.2, cells=cells, missing=["c"])
    text = "\n".join(copying.report.report(results))
    assert "| a | 1.6M, never | 3.00, 3.50 | " in text and "| b | 0.8M, 2.4M | " in text and "Not run yet: c." in text
    (axes,) = copying.report.draw(results).axes
    lines = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines}
    assert ((0.8, 1.6, 2.4), (5.0, 3.1, 3.3)) in {(tuple(np.round(x, 9)), y) for x, y in lines}


@pytest.mark.long
def test_copying_is_looked_at_while_models_are_trained(corpus, tmp_path, monkeypatch, rng):
    monkeypatch.setattr(text, "find_recalled", lambda windows, lengths, *_: rng.random(lengths.sum()) < 0.5)
    monkeypatch.setattr(copying.config, "SEEDS", (0, 1))
    plan = copying.SMALL_PLAN._replace(cells=("softmax",))
    tools.execute(tmp_path, copying.report, lambda: copying.measure(plan, corpus, tmp_path, None, None))
    (cell,) = reports.read_results(tmp_path / "results.json")["cells"].values()
    assert np.shape(cell["recalled_meanwhile"]) == (2, 2) and np.shape(cell["bits_per_byte"]) == (2,)
    assert 0 < np.max(cell["bits_per_byte"]) < 9 and "nan" not in (tmp_path / "report.md").read_text()


def test_pairs_of_cells_with_one_change():
    cells = [
        "exponential, additions",
        "linear, additions",
        "linear",
        "exponential, additions, AdamW",
        "linear, additions, AdamW",
    ]
    assert report.changes(cells) == [
        ("+ AdamW", "exponential, additions", "exponential, additions, AdamW"),
        ("+ AdamW", "linear, additions", "linear, additions, AdamW"),
        ("+ additions", "linear", "linear, additions"),
        ("linear instead of exponential", "exponential, additions", "linear, additions"),
        ("linear instead of exponential", "exponential, additions, AdamW", "linear, additions, AdamW"),
    ]


# ---- conversion -----------------------------------------------------------------------------------


def test_batches_mix_text_with_sequences_of_the_tasks():
    rng = np.random.default_rng()
    text_rows = rng.integers(257, size=(conversion_config.TEXT_ROWS, conversion_config.LENGTH + 1))
    seed, step = int(rng.integers(100)), int(rng.integers(100))
    batch = mix.draw_batch(text_rows, seed, step, 16)
    again = mix.draw_batch(text_rows, seed, step, 0)
    n_pairs, n_copied = (lengths[step % 4] for lengths in (conversion_config.PAIRS, conversion_config.COPIES))
    text_part, recall_part, copy_part = np.split(batch["tokens"], [8, 12])
    assert (text_part == text_rows).all() and (again["tokens"] == batch["tokens"]).all()
    assert (
        (batch["first_place"] < 16 * 256).all() and batch["first_place"].std() > 100 and not again["first_place"].any()
    )
    for row in recall_part:
        first = row[: 2 + 4 * n_pairs]
        pairs = dict(first[1 : 1 + 2 * n_pairs].reshape(-1, 2).tolist())
        assert dict(first[2 + 2 * n_pairs :].reshape(-1, 2).tolist()) == pairs and len(pairs) == n_pairs
    for row in copy_part:
        assert (row[1 : 1 + n_copied] == row[2 + n_copied : 2 + 2 * n_copied]).all()
    assert len({row.tobytes() for row in batch["tokens"]}) == len(batch["tokens"])


def test_the_report_on_some_conversions():
    rng = np.random.default_rng()

    def cell(recall, share=0.1, seeds=(1, 2, 3)):
        items = lambda names: {n: recall + rng.random() / 100 for n in names}
        runs = [
            dict(
                text=2 + rng.random(),
                repeated=[3.0, 2.0, 1.0],
                streams=2.5,
                associative=items((8, 16)),
                copy=items((8,)),
            )
            for _ in seeds
        ]
        tuning = {"attention": {0.1: 0.3, 0.2: 0.2}, "text": {0.001: 3.0, 0.002: 2.0}}
        return dict(
            machine="a chip", jax="0", seconds=3.0, parameters=7, state_numbers=8, tuning=tuning, share=share,
            runs=runs, distances=[0.25, 0.35, 0.3], seeds=list(seeds),
        )  # fmt: skip

    results = dict(
        settings=dict(batch_size=16), teacher_steps=9, tests=5, n_grams=[4, 8, 16], missing=["relu"],
        teachers={conversion_config.MAIN: cell(0.99, 1.0, [4]) | dict(tuning={"text": {0.1: 1.0}}, distances=None)},
        cells={"exponential": cell(0.9), "elu + 1": cell(0.3), "exponential, 25%": cell(0.95, 0.25)},
    )  # fmt: skip
    lines = conversion_report.report(results)
    ours, theirs = (
        conversion_report.scores(results["cells"][name], "associative") for name in ("exponential", "elu + 1")
    )
    want = reports.seed_interval(ours - theirs)
    (row,) = (line for line in lines if line.startswith("| exponential | elu + 1 |"))
    assert f"{want.value:+.1%} [{want.low:+.1%}, {want.high:+.1%}]*" in row
    assert "Not run yet: relu." in lines and sum(line.startswith("| exponential |") for line in lines) == 5
    assert [axis.get_title() for axis in conversion_report.draw(results).axes][2] == "text, bits per byte"


@pytest.mark.long
def test_a_conversion_from_its_teacher_to_its_report(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "CYCLES", 1)
    monkeypatch.setattr(conversion_config, "ATTENTION_RATES", (1e-2, 3e-2, 1e-1))
    plan = conversion.SMALL_PLAN._replace(teacher_steps=20, n_validation=8, n_tests=16)
    tools.execute(tmp_path, conversion_report, lambda: conversion.measure(plan, corpus, tmp_path, None, None))
    found = reports.read_results(tmp_path / "results.json")
    (teacher,), (student,) = found["teachers"].values(), found["cells"].values()
    assert list(found["teachers"]) == [conversion_config.MAIN] and teacher["seeds"] == [4] and teacher["steps"] == 20
    assert student["seeds"] == [1, 2, 3] and student["steps"] == 2 and len(student["runs"]) == 3
    assert len(student["distances"]) == 3 and student["parameters"] > teacher["parameters"]
    # Students of one step a stage are hardly other than their teacher.
    assert all(abs(run["text"] - teacher["runs"][0]["text"]) < 1 for run in student["runs"])


# ---- long contexts --------------------------------------------------------------------------------

WINDOW = 4
LENGTHS = [256, 201, 64]  # bytes


@pytest.fixture(scope="module")
def documents():
    tokens = np.random.default_rng().integers(256, size=(len(LENGTHS), contexts.MOST_WINDOWS * WINDOW + 1))
    tokens[:, 0] = contexts.END
    return contexts.Documents(tokens.astype(np.int32), np.array(LENGTHS))


@pytest.mark.parametrize("attention", ["heinsen", "softmax"])
def test_documents_are_read_in_windows_and_as_a_stream(attention, documents):
    model = model_config(attention=attention, n_layers=1)
    each = [init_params(model, jax.random.key(seed)) for seed in (0, 1)]
    losses = contexts.read_documents(model, jax.tree.map(lambda *x: jnp.stack(x), *each), documents, WINDOW)
    whole = jax.jit(partial(next_token_losses, model))
    streamed = WINDOW * contexts.MOST_CACHED if model.has_cache else documents.tokens.shape[1] - 1
    for lane, params in enumerate(each):
        np.testing.assert_allclose(
            losses["stream"][lane, :, :streamed], whole(params, documents.tokens[:, : streamed + 1]), atol=1e-3
        )
        for start in (0, 8, 60):
            in_window = whole(params, documents.tokens[:, start : start + WINDOW + 1])
            np.testing.assert_allclose(losses["windows"][lane, :, start : start + WINDOW], in_window, atol=1e-3)
        for start in (0, 2, 4, 10, 252):
            second = whole(params, documents.tokens[:, start : start + WINDOW + 1])[:, 2:]
            np.testing.assert_allclose(losses["sliding"][lane, :, start + 2 : start + WINDOW], second, atol=1e-3)
    assert not losses["stream"][..., streamed:].any()


def test_long_documents_are_found_cut_and_summed_by_position():
    rng = np.random.default_rng()
    texts = [rng.integers(256, size=n) for n in (63, 64, 201, 300)]
    streams = {"validation": texts[:2], "test": texts[2:]}
    found = {}
    for split, own in streams.items():
        stream = np.concatenate([[contexts.END], *([*each, contexts.END] for each in own)])
        n = -(-(len(stream) - 1) // WINDOW)
        padded = np.pad(stream, (0, n * WINDOW + 1 - len(stream)))
        found[split] = np.stack([padded[i * WINDOW : i * WINDOW + WINDOW + 1] for i in range(n)])
        found[f"{split}_lengths"] = np.minimum(len(stream) - 1 - WINDOW * np.arange(n), WINDOW)
    tokens, lengths = documents = contexts.find_documents(found, WINDOW, 10)
    assert lengths.tolist() == [256, 201, 64] and (tokens[:, 0] == contexts.END).all()
    for row, want in zip(tokens, (texts[3][:256], texts[2], texts[1]), strict=True):
        assert row[1 : len(want) + 1].tolist() == want.tolist()
    losses = rng.random((2, 3, 256))
    sums = contexts.sum_ranges(losses, documents, WINDOW)
    ends = [0, 4, 8, 16, 32, 64, 128, 256]
    for i, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(sums[:, row, i], losses[:, row, first : min(last, length)].sum(1), atol=1e-9)


def test_the_report_on_long_contexts(documents):
    rng = np.random.default_rng()
    ones = np.ones((1, *documents.tokens[:, 1:].shape))
    tokens = contexts.sum_ranges(ones, documents, WINDOW)[0]
    nats = lambda base: (tokens * (base + rng.random((2, *tokens.shape)))).tolist()
    cell = dict(machine="a chip", jax="0", seconds=3.0, seeds=[1, 2])
    cell |= dict(state_numbers={name: 5 for name in contexts_report.READINGS})
    models = dict(one=(2.0, {}), other=(3.0, dict(block="gpt2")), two=(4.0, {}), last=(5.0, dict(block="gpt2")))
    results = dict(
        cells={name: cell | dict(model=model, nats={each: nats(base) for each in contexts_report.READINGS})
               for name, (base, model) in models.items()},
        missing=[], size="1M", tokens=tokens.tolist(), settings=dict(sequence_length=WINDOW),
    )  # fmt: skip
    cached = results["cells"]["two"]["nats"]
    cached["stream"] = np.array(cached["stream"])[..., :4].tolist()
    lines = contexts_report.report(results)
    rows = [line for line in lines if line.startswith("| two | stream |")]
    ours, theirs = (np.array(results["cells"][name]["nats"]["stream"])[..., 3].sum() for name in ("two", "one"))
    assert f"| {ours / 2 / tokens[:, 3].sum():.3f} |" in rows[0]
    assert f"| {(ours - theirs) / 2 / tokens[:, 3].sum():+.3f} [" in rows[1]
    assert contexts_report.first_of_block(results) == dict(one="one", other="other", two="one", last="other")
    assert not any("nan" in line for line in lines)
    assert len(contexts_report.draw(results).axes) == 1


# ---- parameters and text apart --------------------------------------------------------------------


def test_rates_are_tuned_on_a_grid_and_its_extension(monkeypatch):
    trained = []

    def train(self, seeds, rates, batch_of, n_steps, params):
        trained.append((tuple(seeds), tuple(rates), n_steps))
        return np.asarray(rates), None

    monkeypatch.setattr(lanes.Lanes, "train", train)
    programs = lanes.Lanes(None, 3, None, None, None, None)
    found, best = programs.tune((1.0, 2.0, 4.0), 7, None, 30, lambda rates: (np.log2(rates) - 3) ** 2)
    assert trained == [((7, 7, 7), (1.0, 2.0, 4.0), 30), ((7, 7), (8.0, 16.0), 30)]
    assert found == {1.0: 9, 2.0: 4, 4.0: 1, 8.0: 0, 16.0: 1} and reports.best_rate(found) == 8.0
    assert best == 8.0 and reports.best_rate({1.0: np.nan, 2.0: 5.0}) == 2.0


def test_a_text_of_other_windows_is_refused(tmp_path):
    np.savez(tmp_path / "text.npz", train=np.zeros((5, 2, 4, 9)))
    message = r"training windows \(5, 2, 4, 9\) where this reads \(5, 2, 4, 11\): give another --out"
    with pytest.raises(InputError, match=message):
        text.load(tmp_path, tmp_path, range(5), 10, 4, 2)


@pytest.mark.long
def test_the_text_of_a_corpus_is_read_once(corpus, tmp_path):
    found = text.load(corpus, tmp_path, (0, 1), 16, 2, 3)
    assert found["train"].shape == (2, 3, 2, 17) and (found["train"][0] != found["train"][1]).any()
    targets = found["test"][:, 1:][np.arange(16) < found["test_lengths"][:, None]]
    ends = np.flatnonzero(targets == contexts.END)
    assert len(ends) == 20 and found["num_bytes"].sum() == len(targets) - 20
    assert found["starts"].tolist() == [0, *(ends + 1)] and found["recalled"].shape == (3, len(targets))
    again = text.load(tmp_path / "none", tmp_path, (0, 1), 16, 2, 3)
    assert all(np.array_equal(found[name], again[name]) for name in found)


def test_sums_over_documents():
    rng = np.random.default_rng()
    starts, places = np.array([0, 3, 5, 9]), np.array([0, 2, 3, 8])
    losses = rng.random((2, 4))
    found = text.sum_by_document(losses, places, starts)
    np.testing.assert_allclose(found, np.stack([losses[:, 0] + losses[:, 1], losses[:, 2], losses[:, 3]], axis=1))


@pytest.fixture(scope="module")
def scaled():
    """Results whose softmax has a law, and whose linear attention is above it by known slopes."""
    rng = np.random.default_rng()
    law, read, tokens = Law(np.log(20), np.log(80), np.log(1.2), 0.3, 0.35), (5e5, 1e6, 2e6), rng.integers(50, 99, 6)
    slopes, cells = {"parameters": 0.02, "text": -0.03}, {}
    for name, cell in scaling.config.CELLS.items():
        n_params = 28.0 * cell.width**2
        above = [slopes["parameters"] * np.log2(n_params) + slopes["text"] * np.log2(n) for n in read]
        losses = law(n_params, np.array(read)) + (np.array(above) if cell.kind == "linear" else 0)
        lengths = slice(0 if cell.width in scaling.config.WIDTHS else 2, None)
        cells[name] = dict(
            machine="a chip", jax="0", seconds=3.0, seeds=[1, 2], parameters=n_params, learning_rate=0.5,
            tuning={0.5: 1.0, 1.0: 2.0}, model={"n_layers": 2},
            document_nats=(losses[:, None, None] * tokens + [[[-0.01], [0.01]]])[lengths].tolist(),
        )  # fmt: skip
    return (
        law,
        slopes,
        dict(cells=cells, tokens=tokens.tolist(), text=read, settings=dict(sequence_length=8), missing=[]),
    )


def test_laws_and_slopes_are_found_again(scaled, monkeypatch):
    law, slopes, results = scaled
    monkeypatch.setattr(scaling, "N_LAWS", 2)
    monkeypatch.setattr(scaling, "SIMULATED", (2, 2))
    monkeypatch.setattr(scaling.law, "fit", partial(scaling.law.fit, n_starts=4))
    known = {name: results["cells"][name] for name in results["cells"] if name.startswith(("linear", "softmax"))}
    known = {name: cell for name, cell in known.items() if "256" not in name}
    laws = scaling.find_laws(known, np.array(results["tokens"]), results["text"])
    found = laws["softmax"]
    assert set(laws) == {"linear", "softmax"} and not found["on_bound"]
    assert found["prediction"][0] == pytest.approx(law(found["parameters"], 2e6), rel=1e-4)
    assert found["coefficients"]["alpha"][0] == pytest.approx(0.3, rel=0.01)
    part = results | dict(cells=known, laws=laws, missing=["others"])
    text = "\n".join(scaling_report.report(part))
    assert "not trained yet" in text and "Not run yet: others." in text and "nan" not in text
    lines = scaling_report.report(results | dict(laws=laws))
    family = scaling_report.differences(results, "linear", "softmax")
    for width in scaling.config.WIDTHS:
        np.testing.assert_allclose(family[width, scaling_report.DOUBLING], slopes["text"], atol=1e-3)
    widths = np.array([*scaling.config.WIDTHS, scaling.config.NEXT_WIDTH])
    above = slopes["parameters"] * np.log2(28.0 * widths**2) + slopes["text"] * np.log2(2e6)
    over = scaling_report.over_widths(results, "linear", "softmax")
    np.testing.assert_allclose(over, reports.seed_interval(above), atol=1e-3)
    said = f"{over.value:+.4f} [{over.low:+.4f}, {over.high:+.4f}], by Student's t over 4 widths"
    assert any(said in line for line in lines)
    assert len(scaling_report.draw(part | dict(laws=laws)).axes) == 2


def test_a_coefficient_on_its_bound_is_named():
    assert on_bound(Law(1.0, 2.0, -6.0, 0.3, 2.5)) == ["log_e", "beta"]
    assert on_bound(Law(1.0, 2.0, 0.0, 0.3, 0.3)) == []
