"""docs/replication.md: the programs accept its commands, and its figures follow from their sources."""

import csv
import json
import math
import re

import pytest

from configs import gated_125m, pile_10b, pile_125m
from heinsen.config import from_mapping
from heinsen.training.config import TrainConfig
from tests.documents import commands
from tests.runs import ROOT

TEXT = (ROOT / "docs" / "replication.md").read_text()
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
        for line in (ROOT / "docs" / "scaling.md").read_text().splitlines()
        if line.startswith("#")
    }
    wanted = re.findall(r"\(scaling\.md#([\w-]+)\)", TEXT)
    assert len(wanted) >= 1 and set(wanted) <= titles
    for name in set(re.findall(r"`((?:configs|docs|scripts|tests)/[\w./]+)`", TEXT)):
        assert (ROOT / name).exists(), name


def test_figures_follow_from_what_they_are_computed_from():
    steps, flops = CONFIG.total_steps, 6 * N_PARAMS * 300e9
    rate = lambda name: json.loads((ROOT / "bench" / f"h200_{name}.json").read_text())["tokens_per_second"]
    hours = [300e9 / rate(name) / 3600 for name in ("step_pallas", "step")]
    hours_of_the_milestone = [10e9 / rate(name) / 3600 for name in ("step", "step_pallas", "step_gated")]
    expected = [
        f"{steps:,} steps of {CONFIG.batch_size} x {CONFIG.sequence_length}",
        f"= {flops:.3g} FLOPs".replace("e+", "e"),
        f"{hours[0]:.0f} hours of one H200 at the {rate('step_pallas'):,.0f}"[:-2],
        f"fused kernels, {hours[1]:.0f} without",
        f"**{2.47 * TOKENS_PER_BYTE / math.log(2):.3f}**",
        f"{1254.20 * 2**30 * TOKENS_PER_BYTE / 1e9:.0f}e9, 824.5e9",
        f"0.29335 = {824.5 * TOKENS_PER_BYTE:.0f}e9",
        f"{12.07 + 0.75 + 1.55 + 0.60 + 10.01:.2f}% of The Pile's bytes",
        f"so 296e9 take {round(296e9 / 4.68e6, -3):,.0f} s, {296e9 / 4.68e6 / 3600:.1f} hours",
        f"1 / 0.29335 = {1 / TOKENS_PER_BYTE:.2f}",
        f"stays at {math.log(CONFIG.model.vocab_size):.1f}",
        f"{math.ceil(10e9 / (480 * 1024)):,} steps.",
        "takes {:.1f} hours for the paper's model, {:.1f} fused and {:.1f} gated".format(*hours_of_the_milestone),
    ]
    flowing = " ".join(TEXT.split())
    assert [words for words in expected if words not in flowing] == []


def test_the_milestone_is_the_two_models_on_fewer_tokens():
    for kind, model in (("paper", pile_125m), ("gated", gated_125m)):
        config, whole = pile_10b.get_config(kind), model.get_config()
        changed = {name for name in whole if config[name] != whole[name]}
        assert changed == {"total_tokens", "accumulation_steps", "validate_every"}
        assert from_mapping(TrainConfig, config.to_dict()).total_tokens == 10e9
    with pytest.raises(ValueError, match="kind 'gate': choose paper, gated"):
        pile_10b.get_config("gate")


def test_hours_and_prices_of_the_milestone_follow_from_its_rates():
    prices = [float(price) for price in re.findall(r"\$(\d+) per (?:H100|H200) hour", TEXT)]
    rows = re.findall(r"^\| (?:paper's|gated)(?:, fused)? \|(.*\$.*)\|$", TEXT, re.MULTILINE)
    assert len(prices) == 2 and len(rows) == 4
    for row in rows:
        cells = re.findall(r"[\d.,]+", row)
        for (rate, hours, dollars), price in zip((cells[:3], cells[3:]), prices, strict=True):
            exact = 10e9 / float(rate.replace(",", "")) / 3600
            assert hours == f"{exact:.1f}" and dollars == f"{exact * price:.0f}"


def test_the_table_on_the_way_is_that_of_the_anchors():
    with open(ROOT / "docs" / "anchors.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["label"]]
    anchors = [(float(row["tokens"]), float(row["low"]), float(row["high"])) for row in rows]
    rows = re.findall(r"^\| (\d+e9) \| [\d.]+% \| ([\d.]+) to ([\d.]+) \|", TEXT, re.MULTILINE)
    assert len(rows) == len(anchors) == 7
    for (tokens, low, high), anchor in zip(rows, anchors, strict=True):
        assert float(tokens) == anchor[0]
        assert abs(float(low) - anchor[1]) < 0.0051 and abs(float(high) - anchor[2]) < 0.0051
