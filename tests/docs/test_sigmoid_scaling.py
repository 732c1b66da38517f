"""experiments/sigmoid_scaling: its measurements against closed forms, its table and figure."""

import json
import math

import jax
import numpy as np
import pytest

from experiments import tools
from experiments.sigmoid_scaling import report as report_module
from experiments.sigmoid_scaling.forms import FORMS, Form, compile_together
from experiments.sigmoid_scaling.measure import FEATURES, HEADS, Tokens, fit_exponent, measure_doubling, moments, study
from experiments.sigmoid_scaling.report import plot_norms, report

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture
def tokens(rng):
    return Tokens(*(rng.standard_normal((3, HEADS, 40, FEATURES)) + 1))


def some(*names):
    return {name: FORMS[name] for name in names}


def test_forms_and_their_laws():
    growth = {name: (form.growth, form.doubling) for name, form in FORMS.items()}
    assert growth["sigmoid, alpha = 0"] == (1.0, 2.0) and growth["sigmoid, alpha = 1"] == (0.0, 1.0)
    assert growth["sigmoid, alpha = 1.5"] == (-0.5, 2**-0.5)
    assert growth["softmax"] == growth["heinsen"] == (0.0, 1.0)


def test_exponents_and_their_standard_errors(rng):
    lengths, exponents = [4, 8, 64, 1024], rng.standard_normal(5)
    values = np.exp(rng.standard_normal(5)) * np.array(lengths)[:, None] ** exponents
    slope, error = fit_exponent(lengths, values)
    assert slope == pytest.approx(np.mean(exponents))
    assert error == pytest.approx(np.std(exponents, ddof=1) / math.sqrt(5))


def test_the_integral_and_the_variance_are_those_of_all_tokens(tokens):
    queries = np.arange(3)
    integral, variance = moments(tokens, queries)
    for h in range(HEADS):
        for i in queries:
            weights = 1 / (1 + np.exp(-tokens.k[h] @ tokens.q[h, i] / math.sqrt(FEATURES)))
            terms = weights[:, None] * tokens.v[h]
            np.testing.assert_allclose(integral[h, i], terms.mean(0))
            np.testing.assert_allclose(variance[h, i], terms.var(0).sum())


def test_doubling_tells_whether_its_law_holds(tokens, rng):
    forms = some("sigmoid, alpha = 0.75", "sigmoid, bias = -log n", "softmax")
    wrong = Form(forms["sigmoid, alpha = 0.75"].attend, 0.5, 0.5, 2**0.5, False)
    forms["wrong"] = wrong
    found = measure_doubling(forms, compile_together(forms), tokens, 30, rng)
    assert found["sigmoid, alpha = 0.75"]["ratio"] == pytest.approx(2**0.25, rel=1e-12)
    assert found["softmax"]["ratio"] == pytest.approx(1.0, rel=1e-12)
    assert max(found[name]["departure"] for name in ("sigmoid, alpha = 0.75", "softmax")) < 1e-12
    assert found["wrong"]["departure"] == pytest.approx(2**0.5 - 2**0.25)
    assert abs(found["sigmoid, bias = -log n"]["ratio"] - 1) > 1e-4


def test_a_study_finds_the_law_and_writes_table_and_figure(tokens, rng, tmp_path, monkeypatch):
    """Norms and errors of independent draws are those of their closed form; all tokens together are the limit."""
    forms = some("sigmoid, alpha = 0.5", "sigmoid, alpha = 1", "softmax")
    found = json.loads(json.dumps(study(forms, compile_together(forms), tokens, [8, 32, 128], 16, rng)))
    rows = {row["form"]: row for row in found["forms"]}
    square, n = found["norm_of_integral"] ** 2, np.array(found["lengths"], float)
    assert found["crossover"] == pytest.approx(found["variance_of_one"] / square)
    for name, alpha in (("sigmoid, alpha = 0.5", 0.5), ("sigmoid, alpha = 1", 1.0)):
        law = n**-alpha * np.sqrt(n**2 * square + n * found["variance_of_one"])
        np.testing.assert_allclose(rows[name]["norms"], law, rtol=0.25)
        exponent, error = rows[name]["growth"]
        assert abs(exponent - (1 - alpha)) < 0.15 and 0 < error < 0.1
    errors = np.sqrt(found["variance_of_one"] / n)
    np.testing.assert_allclose(rows["sigmoid, alpha = 1"]["errors"], errors, rtol=0.35)
    assert rows["sigmoid, alpha = 0.5"]["convergence"] is None
    assert rows["softmax"]["convergence"][0] == pytest.approx(-0.5, abs=0.25)
    assert found["fitted_long"] == [32, 128]
    lost = math.log(found["crossover"] / 128 + 1) - math.log(found["crossover"] / 32 + 1)
    assert found["growth_of_fluctuation"][1] == pytest.approx(lost / 2 / math.log(4))

    text = "\n".join(report(found | dict(machine="2 CPU cores", jax="0")))
    assert "drawn from 40 random tokens" in text and text.count("\n| ") == 1 + len(forms)
    assert "| 0.50 | 1.414214 | 1.414214 |" in text
    assert len(plot_norms(found).axes[0].lines) == 2 * 3 + 1
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # which the experiment sets

    def measure():
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "new" / "compiled")
        return found

    before = jax.config.values["jax_compilation_cache_dir"]
    tools.execute(tmp_path / "new", report_module, measure)
    assert jax.config.values["jax_compilation_cache_dir"] == before
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"report.md", "results.json", "norms.png"}


def test_sequences_are_drawn_from_all_tokens(tokens, rng):
    drawn = tokens.draw(rng, 50, 39)
    assert drawn.shape == (50, 39) and drawn.min() == 0 and drawn.max() == 39


def test_random_tokens_lie_around_a_mean_as_long_as_asked(rng):
    for mean, low, high in ((0.0, 0.0, 0.01), (1.0, 0.25, 0.75)):
        v = Tokens.random(rng, mean).v
        share = np.mean(np.sum(v.mean(1) ** 2, axis=-1)) / np.mean(np.sum(v**2, axis=-1))
        assert low < share < high
