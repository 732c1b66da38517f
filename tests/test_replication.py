"""docs/REPLICATION.md: the programs accept its commands, and its figures follow from their sources."""

import csv
import json
import math
import re

from configs import pile_125m
from experiments.ladder.report import interval
from heinsen.config import from_mapping
from heinsen.training.config import TrainConfig
from tests.documents import commands
from tests.runs import ROOT

TEXT = (ROOT / "docs" / "REPLICATION.md").read_text()
CONFIG = from_mapping(TrainConfig, pile_125m.get_config().to_dict())
N_PARAMS = 124_879_872
TOKENS_PER_BYTE = 0.29335


def test_its_commands_are_of_every_program_on_the_way():
    found = commands(TEXT)  # test_guide.py parses them
    assert len(found) >= 20
    assert {program for program, _ in found} == {
        *("train.py", "eval.py"),
        *(f"scripts/{name}.py" for name in ("prepare_data", "plot_runs", "export", "generate", "sweep")),
    }


def test_links_lead_somewhere():
    titles = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in (ROOT / "docs" / "SCALING.md").read_text().splitlines()
        if line.startswith("#")
    }
    wanted = re.findall(r"\(SCALING\.md#([\w-]+)\)", TEXT)
    assert len(wanted) >= 3 and set(wanted) <= titles
    for name in set(re.findall(r"`((?:configs|docs|scripts|tests)/[\w./]+)`", TEXT)):
        assert (ROOT / name).exists(), name


def test_figures_follow_from_what_they_are_computed_from():
    steps, flops = CONFIG.total_steps, 6 * N_PARAMS * 300e9
    hours = [flops / (share * 989e12) / 3600 for share in (0.4, 0.2)]
    expected = [
        f"{steps:,} steps of {CONFIG.batch_size} x {CONFIG.sequence_length}",
        f"= {flops:.3g} FLOPs".replace("e+", "e"),
        f"{hours[0]:.0f} to {hours[1]:.0f} hours of one H100",
        f"**{2.47 * TOKENS_PER_BYTE / math.log(2):.3f}**",
        f"{1254.20 * 2**30 * TOKENS_PER_BYTE / 1e9:.0f}e9, 824.5e9",
        f"0.29335 = {824.5 * TOKENS_PER_BYTE:.0f}e9",
        f"{12.07 + 0.75 + 1.55 + 0.60 + 10.01:.2f}% of The Pile's bytes",
        f"so 296e9 take {round(296e9 / 4.68e6, -3):,.0f} s, {296e9 / 4.68e6 / 3600:.1f} hours",
        f"1 / 0.29335 = {1 / TOKENS_PER_BYTE:.2f}",
        f"stays at {math.log(CONFIG.model.vocab_size):.1f}",
        f"{math.ceil(3e9 / (480 * 1024)):,} steps.",
    ]
    flowing = " ".join(TEXT.split())
    assert [words for words in expected if words not in flowing] == []


def test_the_table_on_the_way_is_that_of_the_anchors():
    with open(ROOT / "docs" / "anchors.csv", newline="") as file:
        anchors = [(float(row["tokens"]), float(row["low"]), float(row["high"])) for row in csv.DictReader(file)]
    rows = re.findall(r"^\| (\d+e9) \| [\d.]+% \| ([\d.]+) to ([\d.]+) \|", TEXT, re.MULTILINE)
    assert len(rows) == len(anchors) == 7
    for (tokens, low, high), anchor in zip(rows, anchors, strict=True):
        assert float(tokens) == anchor[0]
        assert abs(float(low) - anchor[1]) < 0.0051 and abs(float(high) - anchor[2]) < 0.0051


def test_where_the_models_would_land_is_what_the_ladder_says():
    results = json.loads((ROOT / "experiments" / "ladder" / "results.json").read_text())
    per_token = lambda values: [x / TOKENS_PER_BYTE for x in values]
    per_byte, *_ = (point for point in results["farther"] if point["n_params"] == 16e6)
    expected = [interval(per_byte["kinds"]["gate, parts"]["above"], "+.3f")]
    for tokens, point in zip((15, 300), results["farther"][-2:], strict=True):
        assert math.isclose(point["tokens"], tokens * 1e9 / TOKENS_PER_BYTE) and point["n_params"] == 125e6
        kinds = (point["kinds"][kind]["loss"] for kind in ("paper's", "gate, parts", "softmax"))
        expected.append(f"| {tokens}e9 | {' | '.join(interval(per_token(loss), '.2f') for loss in kinds)} |")
    expected.append(interval(per_token(results["farther"][-1]["kinds"]["gate, parts"]["above"]), "+.2f"))
    losses = {(run["size"], run["budget"], run["kind"]): run["loss"] for run in results["runs"]}
    for size, budget in (("4x64", 1.5e6), ("8x192", 6e6)):
        expected.append(f"by {losses[size, budget, 'softmax'] - losses[size, budget, 'gate, parts']:.3f}")
    found = {run["kind"]: run["loss"] for run in results["next"]}
    leads = found["softmax"] - found["gate, parts"], found["paper's"] - found["softmax"]
    expected += [f"by {leads[0]:.3f}", f"to {leads[1]:.3f}"]
    error = found["softmax"] / results["prediction"]["softmax"]["loss"] - 1
    expected.append(f"softmax's was {-100 * error:.1f}% lower than predicted")
    flowing = " ".join(TEXT.split())
    assert [words for words in expected if words not in flowing] == []
