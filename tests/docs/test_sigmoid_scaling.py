"""experiments/sigmoid_scaling/run.py: its measurements against closed forms, its table and figure, its refusals."""

import json
import math

import jax
import numpy as np
import pytest

from experiments.sigmoid_scaling.forms import FORMS, Form, compile_together
from experiments.sigmoid_scaling.measure import QUERIES, fit_exponent, measure_doubling, moments, study
from experiments.sigmoid_scaling.report import plot, table
from experiments.sigmoid_scaling.tokens import FEATURES, HEADS, Tokens, draw_maps, random_tokens, text_tokens
from heinsen.models import forward
from heinsen.parallel import make_mesh
from heinsen.training.folder import load_run
from heinsen.weights import load_params

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture
def tokens(rng):
    return Tokens("these", *(rng.standard_normal((3, HEADS, 40, FEATURES)) + 1), in_order=False)


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


def test_a_study_finds_the_law_and_writes_table_and_figure(tokens, rng, tmp_path):
    """Norms and errors of independent draws are those of their closed form; all tokens together are the limit."""
    forms = some("sigmoid, alpha = 0.5", "sigmoid, alpha = 1", "softmax")
    forms["heinsen"] = forms["softmax"]  # which the figure asks for: compiling it would take longest
    found = json.loads(json.dumps(study(forms, compile_together(forms), tokens, [8, 32, 128], 16, rng)))
    rows = {row["form"]: row for row in found["results"]}
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

    lines = table(found)
    assert lines[0].startswith("these: 40 to draw from") and len(lines) == 2 + len(forms)
    assert any(line.startswith("sigmoid, alpha = 0.5") and "1.414214 1.414214" in line for line in lines)
    plot([found | {"tokens": "random tokens"}], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_sequences_in_order_are_runs_of_the_text(tokens, rng):
    drawn = Tokens("text", tokens.q, tokens.k, tokens.v, True).draw(rng, 50, 39)
    assert drawn.shape == (50, 39) and set(drawn[:, 0]) == {0, 1} and np.all(np.diff(drawn) == 1)
    free = tokens.draw(rng, 50, 39)
    assert free.min() == 0 and free.max() == 39 and not np.all(np.diff(free) == 1)


def test_random_tokens_lie_around_a_mean_as_long_as_asked(rng):
    for mean, low, high in ((0.0, 0.0, 0.01), (1.0, 0.25, 0.75)):
        v = random_tokens(rng, mean).v
        share = np.mean(np.sum(v.mean(1) ** 2, axis=-1)) / np.mean(np.sum(v**2, axis=-1))
        assert low < share < high


@pytest.mark.long
def test_text_is_seen_as_the_hidden_states_of_the_run(run, rng):
    """Maps of the hidden states that the model's logits are made of: seen from outside, logits are linear in them."""
    at_most, state = 100, rng.bit_generator.state
    in_order, free = text_tokens(rng, run.workdir, at_most, QUERIES)
    config = load_run(run.workdir)
    length = config.sequence_length
    n = at_most // length * length
    assert in_order.k.shape == (HEADS, n, FEATURES) and in_order.in_order and not free.in_order
    text = np.load(next((run.data / "validation").glob("*.npy")))[:n].reshape(-1, length).astype(np.int32)
    _, params = load_params(run.workdir, config.model, make_mesh())
    logits = np.asarray(jax.jit(forward, static_argnums=0)(config.model, params, text)[0], np.float64)
    hidden = logits.reshape(n, -1) @ np.linalg.pinv(np.asarray(params["embedding"], np.float64)).T
    rng.bit_generator.state = state
    want = np.einsum("nw,phwd->phnd", hidden, draw_maps(rng, config.model.d_model))
    for got, expected in zip((in_order.q, in_order.k, in_order.v), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-2)
    with pytest.raises(ValueError, match="windows of 16 hold 96 of at most 100 tokens, a sequence 97:"):
        text_tokens(rng, run.workdir, at_most, 97)


# ---- the command -------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_measures_a_run_and_writes_it_down(commands, run, tmp_path):
    where = [
        "experiments/sigmoid_scaling/run.py",
        f"--out={tmp_path}",
        f"--workdir={run.workdir}",
    ]
    result = commands.run(*where, "--lengths=8,16,32", "--sequences=4", "--tokens=320")
    assert result.returncode == 0, result.stderr
    assert "random tokens: 100%" in result.stderr
    for name in ("random tokens", "text, in order", "text, independent"):
        assert f"\n{name}: " in result.stdout
    studies = json.loads((tmp_path / "results.json").read_text())["studies"]
    assert [found["population"] for found in studies] == [4096, 320, 320]
    for row in (row for found in studies for row in found["results"] if row["doubling_predicted"]):
        assert row["doubling_departure"] < 1e-6
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "sigmoid_scaling.png"}


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--lengths=16,many,32", "--lengths: 'many' is not a number above 0"),
        ("--lengths=16,32", "--lengths=16,32: give three numbers"),
        ("--workdir=nowhere", "error: nowhere is not a run folder"),
    ],
)
def test_bad_input_is_named(commands, tmp_path, argument, message):
    result = commands.fork("experiments/sigmoid_scaling/run.py", f"--out={tmp_path}", argument)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
