"""The experiments: reports from the committed results, intervals, laws, and what their programs share."""

import importlib
import re

import numpy as np
import pytest
from scipy import stats

from experiments import reports, tools
from experiments.scaling.law import Law, bootstrap, coverage, fit
from tests.runs import ROOT

pytest_plugins = ["tests.run_fixtures"]

NAMES = "attribution", "conversion", "copying", "long_contexts", "recall_by_state", "scaling", "speed"
EXPERIMENTS = {name: importlib.import_module(f"experiments.{name}.run") for name in NAMES}
RESULTS = sorted(file.parent for file in (ROOT / "experiments").rglob("results.json"))
FINISHED = "sigmoid_scaling", "sigmoid_training"  # their programs have left


# ---- committed results ----------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [each for each in RESULTS if each.name not in FINISHED], ids=lambda x: x.name)
def test_the_committed_report_follows_from_its_results(folder, tmp_path, capsys):
    (tmp_path / "results.json").write_text((folder / "results.json").read_text())
    report = EXPERIMENTS[folder.relative_to(ROOT / "experiments").parts[0]].report
    tools.execute(tmp_path, report, None)
    text = (tmp_path / "report.md").read_text()
    assert {file.name for file in tmp_path.glob("*.png")} == set(report.FIGURES)
    for figure in report.FIGURES:
        assert f"({figure})" in text and (tmp_path / figure).stat().st_size > 10_000
    for file in ("report.md", "results.json"):
        assert (tmp_path / file).read_text() == (folder / file).read_text()
    assert text in capsys.readouterr().out and " nan" not in text and "None" not in text


def test_the_reports_of_finished_experiments_have_the_figures_of_their_results():
    scaling, training = ((ROOT / "experiments" / name / "report.md").read_text() for name in FINISHED)
    found, trained = (reports.read_results(ROOT / "experiments" / name / "results.json") for name in FINISHED)
    for row in found["forms"]:
        cells = [f"{value:.4f} +- {error:.4f}" for value, error in (row["growth"], row["growth_of_long"])]
        assert f"| {row['form']} | {' | '.join(cells)} |" in scaling
    for name, losses in trained["rates"].items():
        cells = [f"**{x:.4f}**" if x == min(losses.values()) else f"{x:.4f}" for x in losses.values()]
        assert f"| {name} | {' | '.join(cells)} |" in training
    for beyond in trained["beyond"].values():
        for form, read in beyond["positions"].items():
            last = read["ranges"][-1]
            shown = re.escape(f"{last['streaming']:.3f} ({last['difference']:+.3f}")
            assert re.search(rf"\| {re.escape(form)} .*\| {shown}", training)
    for name, text in zip(FINISHED, (scaling, training), strict=True):
        assert "git switch --detach 792a2e2\n" in text and f"python experiments/{name}/run.py" in text


def test_a_report_needs_results(tmp_path):
    with pytest.raises(SystemExit, match=r"has no results\.json: run the experiment without --report"):
        tools.execute(tmp_path, EXPERIMENTS["scaling"].report, None)


# ---- intervals ------------------------------------------------------------------------------------


def test_an_interval_over_seeds_is_that_of_student(rng):
    values = rng.normal(1.0, 2.0, 5)
    found = reports.seed_interval(values)
    want = stats.ttest_1samp(values, 0.0)
    np.testing.assert_allclose(found[:4], [values.mean(), *want.confidence_interval(0.95), want.pvalue])
    same = reports.seed_interval(np.ones(3))
    assert same[:4] == (1, 1, 1, 0) and reports.seed_interval(np.zeros(3)).p == 1


@pytest.mark.parametrize("n_seeds", [3, 4, 10])
def test_a_detectable_difference_is_found_in_about_80_of_100_experiments(n_seeds, rng):
    values = rng.standard_normal(n_seeds)
    error, t = stats.sem(values), stats.t(n_seeds - 1)
    power = stats.nct.sf(t.ppf(0.975), n_seeds - 1, reports.seed_interval(values).detectable / error)
    assert power == pytest.approx(0.8, abs=0.04)


def test_p_values_are_corrected_for_their_number():
    """An example of Holm's: the smallest times 4, the next times 3, and none below one that is smaller."""
    np.testing.assert_allclose(reports.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert reports.holm([0.6, 0.7]) == [1, 1] and reports.holm([]) == []


def test_differences_are_marked_where_they_survive_the_correction():
    seeds = np.array([-1.0, 0.0, 1.0])
    family = {"clear": 100 + seeds, "uncorrected": 5 + seeds, "none": 0.1 + seeds}
    shown, said = reports.show_family(family, "+.2f"), reports.explain_family(family)
    assert shown["clear"] == "+100.00 [+97.52, +102.48]*"
    assert shown["none"] == "+0.10 [-2.38, +2.58] (3.10)"
    assert reports.seed_interval(family["uncorrected"]).p < 0.05 and shown["uncorrected"].endswith("]*")
    more = reports.show_family(family | {str(i): seeds for i in range(9)}, "+.2f")
    assert more["clear"].endswith("*") and more["uncorrected"].endswith("] uncorrected")
    assert (
        "3 seeds that both sides share (2 degrees of freedom)" in said and "all differences of this table (3)" in said
    )


def test_the_best_rate_and_the_end_of_a_grid_are_named():
    tuning = {"a": {1e-3: 2.0, 2e-3: float("nan")}, "b": {1e-3: 3.0, 2e-3: 1.0, 4e-3: 1.5}}
    lines = reports.tuning_section(tuning, "runs")
    assert lines[2].endswith(" At the end of the grid: a.")
    assert lines[-3:-1] == ["| a | **2.0000** | diverged |  |", "| b | 3.0000 | **1.0000** | 1.5000 |"]


# ---- laws -----------------------------------------------------------------------------------------


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


def test_the_coverage_of_a_prediction_is_that_of_simulated_experiments(rng):
    law, (sizes, tokens) = draw_law(rng), draw_runs(rng, 20)
    assert 0.5 < coverage(law, sizes, tokens, 1e-3, (1e6, 1e7), 8, 8) <= 1
