"""The experiments: the law they fit, who takes part, and (long) both whole, from their command to their report."""

import json

import numpy as np
import pytest

from experiments.attention_comparison.contestants import CONTESTANTS, SIGMOIDS, train_config
from experiments.attention_comparison.report import growth, state_size, versus
from experiments.ladder.law import Law, bootstrap, fit
from experiments.ladder.run import n_params as n_params_of
from experiments.ladder.run import parse_rate, parse_size, settings
from experiments.tools import ExperimentError, n_params, parse_numbers

pytest_plugins = ["tests.run_fixtures"]


def draw_law(rng):
    alpha, beta = rng.uniform(0.2, 0.6, 2)
    a, b = rng.uniform(0.3, 1.5, 2)  # nats in the middle of the runs below
    return Law(
        np.log(a) + alpha * np.log(4e5), np.log(b) + beta * np.log(2e6), np.log(rng.uniform(0.5, 2)), alpha, beta
    )


def draw_runs(rng, n=14):
    sizes = np.exp(rng.uniform(np.log(1e5), np.log(2e6), n))
    return sizes, sizes * np.exp(rng.uniform(np.log(2), np.log(20), n))


def test_a_law_is_found_again(rng):
    law, (sizes, tokens) = draw_law(rng), draw_runs(rng)
    found = fit(sizes, tokens, law(sizes, tokens), n_starts=10)
    np.testing.assert_allclose(found(sizes, tokens), law(sizes, tokens), rtol=1e-6)
    np.testing.assert_allclose(found(5e6, 1e8), law(5e6, 1e8), rtol=1e-3)


def test_the_bands_are_as_wide_as_the_noise(rng):
    """Of 20 runs and 5 coefficients a fit is off by half the noise at its runs."""
    law, noise, (sizes, tokens) = draw_law(rng), np.exp(rng.uniform(-7, -4)), draw_runs(rng, 20)
    losses = law(sizes, tokens) * np.exp(noise * rng.standard_normal(20))
    best = fit(sizes, tokens, losses, n_starts=4)
    others = bootstrap(best, sizes, tokens, losses, 8)
    width = np.std([np.log(other(sizes, tokens) / best(sizes, tokens)) for other in others])
    assert noise / 6 < width < 2 * noise


def test_too_few_runs_are_no_law(rng):
    sizes, tokens = draw_runs(rng, 5)
    with pytest.raises(ValueError, match="5 runs cannot determine 5 coefficients"):
        fit(sizes, tokens, sizes)


def test_contestants_have_as_many_parameters_within_1_percent():
    sizes = {name: n_params(train_config(each)) for name, each in (CONTESTANTS | SIGMOIDS).items()}
    assert max(sizes.values()) < 1.01 * min(sizes.values()), sizes


def test_what_is_remembered_grows_with_the_text_only_where_there_is_a_cache():
    for name, each in CONTESTANTS.items():
        few, many = (state_size(each, n) for n in (100, 1000))
        grows = "softmax" in name or name == "sigmoid"
        assert (many > few) == grows
    heads, features = 4, 32
    assert state_size(CONTESTANTS["heinsen"], 100) >= 4 * heads * features * features
    assert state_size(CONTESTANTS["softmax"], 100) == 4 * heads * 2 * 100 * features


def test_the_law_of_sigmoid_attention_over_a_window():
    t = np.arange(1, 513)
    assert growth(CONTESTANTS["sigmoid"]) == pytest.approx(1 / 2)
    assert growth(SIGMOIDS["alpha 0.5"]) == pytest.approx(np.sqrt(np.mean(t)) / 2)
    assert growth(SIGMOIDS["alpha 1.5"]) == pytest.approx(np.sqrt(np.mean(1 / t)) / 2)
    n_sigmoids = [sum(1 / (1 + np.exp(np.log(n))) for _ in range(n)) for n in t]
    assert growth(SIGMOIDS["alpha 0, bias -log n"]) == pytest.approx(np.sqrt(np.mean(np.square(n_sigmoids))))


def test_differences_are_those_of_equal_seeds():
    bits = {"a": {1: 2.0, 2: 3.0, 3: 4.0}, "b": {1: 2.1, 2: 3.2, 3: 4.3}}
    text = versus(bits, "b", "a")  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    assert text == "b is +0.2000 [-0.0484, +0.4484] above it."


def test_the_ladder_takes_tokens_and_rates_by_the_size(rng):
    size = int(rng.integers(1, 9)), 32 * int(rng.integers(1, 12))
    n_layers, d = size
    n = n_layers * (6 * d * d + 7 * d) + 2 * d * d + 2 * d + 264 * d + 2 * d
    assert n_params_of(size) == n
    run = settings("heinsen", size, 4.0, 3e-3)
    assert run["total_tokens"] == 4 * n
    assert run["optimizer.learning_rate"] == float(f"{3e-3 * 128 / d:.4g}")  # four digits, in folder names too


@pytest.mark.parametrize("text", ["4", "0x128", "4x100", "4x-32", ""])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ExperimentError, match="LAYERSxWIDTH"):
        parse_size(text)


@pytest.mark.parametrize("text", ["3e-3", ":3e-3", "heinsen:fast", "heinsen:-1", "heinsen:", ""])
def test_rates_that_are_none_are_refused(text):
    with pytest.raises(ExperimentError, match="--learning_rates: "):
        parse_rate(text)


@pytest.mark.parametrize("texts", [[], ["1", "0"], ["2", "inf"], ["nan"], ["x"]])
def test_numbers_that_are_none_are_refused(texts):
    with pytest.raises(ExperimentError, match="--flag: '.*' is not a positive number"):
        parse_numbers("flag", texts)


# ---- whole ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_ladder_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/ladder/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--sizes=1x32,1x64"]
    command += ["--next=2x64", "--tokens_per_parameter=7,8,9"]  # more steps than the warm-up has
    end = commands.run(*command, n_programs=2 * (2 * 3 + 1))
    assert end.returncode == 0, end.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["runs"]) == 12 and len(results["next"]) == 2
    assert results["prediction"] == json.loads((tmp_path / "prediction.json").read_text())["predictions"]
    report = (tmp_path / "report.md").read_text()
    assert "a miss of" in report and report in end.stdout
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    before = (tmp_path / "prediction.json").stat().st_mtime_ns
    assert commands.run(*command).returncode == 0
    assert (tmp_path / "prediction.json").stat().st_mtime_ns == before, "what was predicted stays"


@pytest.mark.long
def test_the_comparison_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/attention_comparison/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--seeds=2"]
    command += ["--learning_rates=3e-3", "--tuning_tokens=110000", "--tokens=110000", "--recall_steps=101"]
    command += ["--speed_lengths=32,64"]
    n_runs = 2 * len(CONTESTANTS) + len(SIGMOIDS)  # each is tested, too
    end = commands.run(*command, n_programs=len(CONTESTANTS | SIGMOIDS) + 2 * n_runs + len(CONTESTANTS))
    assert end.returncode == 0, end.stderr
    report = (tmp_path / "report.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["bits_per_byte"]) == set(CONTESTANTS) and set(results["sources"]) == {"A", "B"}
    for name, of_seeds in results["bits_per_byte"].items():
        assert name in report and set(of_seeds) == {"1", "2"}
    for figure in ("curves", "recall", "sigmoid"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ladder/run.py", "--corpus={}", "--sizes=4x100"], "a multiple of 32"),
        (["attention_comparison/run.py", "--corpus={}/none"], "has failed"),
    ],
)
def test_bad_commands_are_named(commands, tmp_path, arguments, message):
    script, *rest = (argument.format(tmp_path) for argument in arguments)
    end = commands.run(f"experiments/{script}", f"--out={tmp_path / 'out'}", *rest)
    assert end.returncode == 1 and message in end.stderr and "Traceback" not in end.stderr
