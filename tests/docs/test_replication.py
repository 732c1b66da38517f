"""docs/replication.md: the programs accept its commands, and its figures follow from their sources."""

import csv
import json
import math
import re

import pytest

from configs import gated_125m, gpt2_124m, pile_10b, pile_125m
from heinsen.config import from_mapping
from heinsen.models import abstract_params, count_params
from heinsen.training.config import TrainConfig
from tests.documents import commands
from tests.runs import ROOT

TEXT = (ROOT / "docs" / "replication.md").read_text()
CONFIG = from_mapping(TrainConfig, pile_125m.get_config().to_dict())
N_PARAMS = 124_879_872
TOKENS_PER_BYTE = 0.29335
BITS = TOKENS_PER_BYTE / math.log(2)  # per byte, of a nat per GPT-2 token
PRICE = 3  # dollars per H200 hour


def test_its_commands_are_of_every_program_on_the_way():
    found = commands(TEXT)  # test_guide.py parses them
    assert len(found) >= 20
    assert {program for program, _ in found} == {
        *("train.py", "eval.py"),
        *(f"scripts/{name}.py" for name in ("prepare_data", "plot_runs", "export", "generate", "sweep")),
    }


def test_figures_follow_from_what_they_are_computed_from():
    missing = 0.01 * (12.07 + 0.75 + 1.55 + 0.60 + 10.01)  # Books3, BookCorpus2, both subtitles, OpenWebText2
    pile = 1254.20 * 2**30 * TOKENS_PER_BYTE
    mirror, rate = 296e9, 4.68e6
    assert count_params(abstract_params(CONFIG.model)) == N_PARAMS and abs(pile * (1 - missing) / mirror - 1) < 0.002
    expected = [
        f"{N_PARAMS:,} parameters",
        f"{CONFIG.total_steps:,} steps of {CONFIG.batch_size} x {CONFIG.sequence_length}",
        f"milestone 10e9 = {math.ceil(10e9 / (480 * 1024)):,} steps",
        f"= {6 * N_PARAMS * 300e9:.3g} FLOPs".replace("e+", "e"),
        f"340 GB to download, {2 * mirror / 1e9:.0f} GB of tokens, {12 * N_PARAMS / 1e9:.1f} GB per checkpoint",
        f"{340 / 30:.0f} GB to download, {2 * mirror / 30 / 1e9:.0f} GB of tokens: one of thirty files",
        f"lacks five parts, {missing:.2%} of its bytes",
        f"by {missing * (1.2253 / BITS - 2.47):.2f} nats per token, if the missing parts",
        f"outside 0 to {missing * (1.2253 / BITS - 2.47):.2f}, look",
        f"= **{2.47 * BITS:.3f}**",
        f"against {2.47 * BITS:.3f}), else",
        "reaches 2.477 after 10e9 tokens, a thirtieth",
        f"is at most {math.log(10.56) * BITS:.2f} bits per byte",
        f"x 0.29335 = {pile / 1e9:.0f}e9",
        f"about {mirror / 30e9:.1f}e9 tokens, which 10e9 read {10e9 * 30 / mirror:.2f} times",
        f"2 CPU cores {mirror / 30 / rate / 60:.0f} minutes",
        f"all thirty {mirror / rate / 3600:.1f} hours ({rate / 1e6}M tokens/s)",
        f"1 / 0.29335 = {1 / TOKENS_PER_BYTE:.2f}",
        f"takes {3 * 300e6 / 10e9:.0%} of a milestone's tokens",
        f"{round(524_288 / 0.140 / 8, -3):,.0f} tokens/s each",
        f"stays at {math.log(CONFIG.model.vocab_size):.1f}",
    ]
    flowing = " ".join(TEXT.split())
    assert [words for words in expected if words not in flowing] == []


def test_the_milestone_is_three_models_on_fewer_tokens():
    for kind, model in (("paper", pile_125m), ("gated", gated_125m), ("gpt2", gpt2_124m)):
        config, whole = pile_10b.get_config(kind), model.get_config()
        changed = {name for name in whole if config[name] != whole[name]}
        assert changed == {"total_tokens", "accumulation_steps", "validate_every"}
        assert from_mapping(TrainConfig, config.to_dict()).total_tokens == 10e9
    with pytest.raises(ValueError, match="kind 'gate': choose paper, gated, gpt2"):
        pile_10b.get_config("gate")


def test_hours_and_prices_follow_from_measured_steps_and_bounds():
    planning = (ROOT / "docs" / "planning.md").read_text()
    found = re.findall(r"^\| (.*) \| `h200` \|.*\| ([\d,]+) \|$", planning, re.MULTILINE)
    bounds = {model.replace("softmax", "GPT-2"): float(rate.replace(",", "")) for model, rate in found}
    files = {"paper's": "step", "paper's, fused": "step_pallas", "gated": "step_gated", "gated, fused": "", "GPT-2": ""}

    def both(rate, bound, of_rate, of_bound):
        return f"{of_rate(rate) if rate else ''} {f'({of_bound(bound)})' if bound else ''}".strip()

    def cell(rate, bound, tokens, digits):
        hours = lambda rate: tokens / rate / 3600
        price = lambda rate: f"${PRICE * hours(rate):,.0f}"
        return both(rate, bound, lambda rate: f"{hours(rate):.{digits}f} h, {price(rate)}", price)

    rows = []
    for model, name in files.items():
        step = json.loads((ROOT / "bench" / f"h200_{name}.json").read_text()) if name else {}
        rates = step.get("tokens_per_second"), bounds.get(model)
        of_second = lambda rate: f"{round(rate, -2):,.0f}"
        rows.append([model, both(*rates, of_second, of_second), cell(*rates, 10e9, 1), cell(*rates, 300e9, 0)])
    table = TEXT.split("| model | tokens/s |")[1].split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert found == rows


def test_the_table_of_published_losses_is_that_of_the_anchors():
    with open(ROOT / "docs" / "anchors.csv", newline="") as file:
        anchors = [[row["tokens"], row["loss"], row["label"]] for row in csv.DictReader(file)]
    rows = re.findall(r"^\| ([\d.]+e9) \| ([\d.]+) \| (.*) \|$", TEXT, re.MULTILINE)
    assert [list(row) for row in rows] == anchors and len(rows) == 6
