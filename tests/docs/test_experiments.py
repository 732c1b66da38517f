"""The experiments: reports from the committed results, contestants, laws, and each from its plan to its report."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import zstandard

from experiments import reports, tools
from experiments.scaling.law import Law, bootstrap, fit
from experiments.sigmoid_training import contexts
from experiments.sigmoid_training.contestants import (
    FORMS,
    ONE,
    STEEPER,
    best_rate,
    exchanged_scale,
    fields,
    growth,
    losses,
    train_config,
    write_start,
)
from experiments.sigmoid_training.run import common_rate
from experiments.tools import ExperimentError
from heinsen.export import load_folder
from heinsen.models import abstract_params, count_params, init_params
from heinsen.sweep.runs import RunView, SweepRun
from tests.runs import ROOT

pytest_plugins = ["tests.run_fixtures"]

EXPERIMENTS = {
    name: importlib.import_module(f"experiments.{name}.run")
    for name in (
        "attribution",
        "long_contexts",
        "recall_by_state",
        "scaling",
        "sigmoid_scaling",
        "sigmoid_training",
        "speed",
    )  # fmt: skip
}


def write_whole(run, plan, out, corpus=None):
    """Run an experiment with a plan, and check its report; return its results."""
    tools.execute(out, run.report, lambda: run.measure(plan, *[corpus] * (corpus is not None), out, 1))
    report, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())
    check_figures(run.report, out)
    assert " nan" not in report and "None" not in report
    tools.execute(out, run.report, None)
    assert (out / "report.md").read_text() == report and json.loads((out / "results.json").read_text()) == found
    return found


def check_figures(report, out):
    text = (out / "report.md").read_text()
    assert {file.name for file in out.glob("*.png")} == set(report.FIGURES)
    for figure in report.FIGURES:
        assert f"({figure})" in text and (out / figure).stat().st_size > 10_000


# ---- committed results ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", sorted(file.parent for file in (ROOT / "experiments").rglob("results.json")), ids=lambda x: x.name
)
def test_the_committed_report_follows_from_its_results(folder, tmp_path, capsys):
    (tmp_path / "results.json").write_text((folder / "results.json").read_text())
    report = EXPERIMENTS[folder.relative_to(ROOT / "experiments").parts[0]].report
    tools.execute(tmp_path, report, None)
    check_figures(report, tmp_path)
    for file in ("report.md", "results.json"):
        assert (tmp_path / file).read_text() == (folder / file).read_text()
    assert (tmp_path / "report.md").read_text() in capsys.readouterr().out


def test_a_report_needs_results(tmp_path):
    with pytest.raises(SystemExit, match=r"has no results\.json: run the experiment without --report"):
        tools.execute(tmp_path, EXPERIMENTS["scaling"].report, None)


# ---- contestants ----------------------------------------------------------------------------------


def test_forms_of_sigmoid_attention_are_of_equal_size_and_differ_in_what_they_say():
    models = {form: train_config(form).model for form in FORMS}
    assert len({count_params(abstract_params(model)) for model in models.values()}) == 1
    assert len(set(models.values())) == len(models)
    for form, model in models.items():
        said = {field.removeprefix("model."): value for field, value in fields(form).items()}
        assert FORMS[form].items() <= said.items()
        assert all(getattr(model, field) == value for field, value in said.items())


# ---- tuning and laws ------------------------------------------------------------------------------


def test_the_best_rate_is_that_of_a_run_which_has_not_crashed():
    view = lambda form, rate, state, loss: RunView(
        run=SweepRun({**fields(form), tools.RATE: rate}, 10, 64), state=state, validation_loss=loss
    )
    runs = [view(ONE, 1e-3, "finished", 2.0), view(ONE, 2e-3, "crashed", 1.0), view(STEEPER, 3e-3, "finished", 0.5)]
    assert losses(ONE, runs) == {1e-3: 2.0, 2e-3: None} and best_rate(ONE, runs) == 1e-3
    lines = reports.tuning_section({ONE: losses(ONE, runs)})
    assert "At the end of the grid: alpha 1." in lines[2] and "| alpha 1 | **2.0000** | crashed |" in lines
    with pytest.raises(ExperimentError, match="alpha 1 has crashed at all learning rates"):
        best_rate(ONE, runs[1:])


def test_the_common_rate_is_the_best_for_all_where_none_has_crashed():
    losses = {"a": {1e-3: 2.0, 2e-3: 1.0, 4e-3: 0.5}, "b": {1e-3: 2.5, 2e-3: 3.0, 4e-3: None}}
    assert common_rate(losses) == 2e-3
    with pytest.raises(ExperimentError, match="one of the forms has crashed at each"):
        common_rate({"a": {1e-3: None, 2e-3: 1.0}, "b": {1e-3: 1.0, 2e-3: None}})


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


# ---- sigmoid attention ----------------------------------------------------------------------------


def test_the_law_of_sigmoid_attention_over_a_window():
    t = np.arange(1, 513)
    assert growth(ONE, 512) == pytest.approx(1 / 2)
    assert growth("alpha 0.5", 512) == pytest.approx(np.sqrt(np.mean(t)) / 2)
    assert growth(STEEPER, 512) == pytest.approx(np.sqrt(np.mean(1 / t)) / 2)
    n_sigmoids = [sum(1 / (1 + np.exp(np.log(n))) for _ in range(n)) for n in t]
    assert growth("alpha 0, bias -log n", 512) == pytest.approx(np.sqrt(np.mean(np.square(n_sigmoids))))


@pytest.mark.parametrize("form", [ONE, STEEPER])
def test_initial_outputs_are_exchanged(form, tmp_path):
    """With the factor in W2, what a layer's W2 makes of equal tokens has the scale of the other form."""
    write_start(tmp_path / "start", form, exchanged_scale(form))
    _, _, params = load_folder(tmp_path / "start")
    own = init_params(train_config(form).model, jax.random.key(1))
    scale = params["layers"]["w2"]["kernel"] / own["layers"]["w2"]["kernel"]
    other = {ONE: STEEPER, STEEPER: ONE}[form]
    np.testing.assert_allclose(scale * growth(form, 512) / growth(other, 512), 1, rtol=1e-5)
    del params["layers"]["w2"], own["layers"]["w2"]
    jax.tree.map(np.testing.assert_array_equal, params, dict(own))


# ---- programs and data ----------------------------------------------------------------------------


def test_results_of_programs_are_kept(tmp_path, capfd):
    """The same command resumes: only what is missing, or has other arguments, or has failed, is computed again."""
    ran = tmp_path / "ran"
    script = "import sys; print('said', sys.argv[2], file=sys.stderr); open(sys.argv[1], 'a').write(sys.argv[2]); "
    script += "print(0); print([int(sys.argv[2])])"
    commands = {tmp_path / "kept" / f"{i}.json": ["-c", script, str(ran), str(i)] for i in (1, 2)}
    wanted = dict(zip(commands, ([1], [2]), strict=True))
    assert tools.run_programs(commands, 1) == wanted
    assert "programs: 100%" in capfd.readouterr().err
    assert (tmp_path / "kept" / "1.json.log").read_text() == "said 1\n"
    assert tools.run_programs(commands, 2) == wanted and ran.read_text() == "12"
    first, second = commands
    first.unlink()
    commands[second] = ["-c", script, str(ran), "3"]
    assert list(tools.run_programs(commands, 1).values()) == [[1], [3]] and ran.read_text() == "1213"
    commands[first] = ["-c", script, str(ran), "x"]
    for _ in range(2):  # what has failed starts again
        with pytest.raises(ExperimentError, match=r"has failed, see .*1\.json\.log"):
            tools.run_programs(commands, 1)
    assert ran.read_text() == "1213xx"


EXPERIMENT = """
import pathlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from experiments import tools
tools.execute(pathlib.Path({out!r}), None, lambda: tools.run_script("-c", {program!r}))
"""
SLOW_TO_SAVE = """
import pathlib, signal, time
def save(number, frame):
    time.sleep(0.3)
    pathlib.Path({file!r}).write_text(str(number))
    raise SystemExit(0)
signal.signal(signal.SIGINT, save)
print("started", flush=True)
time.sleep(60)
"""


def test_an_interrupted_experiment_waits_for_its_program_to_save(tmp_path):
    """Ctrl-C reaches the program as well."""
    saved = tmp_path / "saved"
    code = EXPERIMENT.format(program=SLOW_TO_SAVE.format(file=str(saved)), out=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    experiment = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with experiment:
        assert "started\n" in iter(experiment.stderr.readline, "")
        os.killpg(experiment.pid, signal.SIGINT)
        assert experiment.stderr.readline() == "interrupted; rerun the same command to resume\n"
        assert saved.read_text() == str(int(signal.SIGINT))
    assert experiment.returncode == 1


def test_results_name_no_folder_above_the_repository(tmp_path):
    assert tools.from_root(ROOT / "runs" / "x") == "runs/x"
    assert tools.from_root(tmp_path) == str(tmp_path)


def test_long_documents_are_found_and_cut(rng, tmp_path):
    texts = ["a" * n for n in rng.integers(50, 200, 40)] + ["é" * 100]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "train-1.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    long, last = [text for text in texts if len(text.encode()) >= 8 * 12], tmp_path / "train-1.jsonl.zst"
    assert contexts.find_long(last, 1000, 12) == ["a" * 12] * (len(long) - 1) + ["é" * 6]
    assert len(contexts.find_long(last, 3, 12)) == 3
    for documents, message in ((0, "two files train-"), (1, "no document of 4000 bytes")):
        if documents:
            (tmp_path / "train-0.jsonl.zst").write_bytes(b"")
        with pytest.raises(ExperimentError, match=message):
            contexts.prepare(tmp_path, tmp_path / "out", 5, 500)


def test_losses_after_a_document_was_cut_are_left_out(monkeypatch, tmp_path):
    """A token of its end follows, which a model of a text that goes on does not expect."""
    ranges = [dict(first=2 ** (i - 1) + 1 if i else 1, last=2**i) for i in range(12)]

    def fake_test(folder, runs, out, parallel, split):
        assert split == "a split" and [run.name for run in runs] == ["a run"]
        return {run.name: dict(by_position=dict(window=512, ranges=ranges)) for run in runs}

    monkeypatch.setattr(contexts, "evaluate_runs", fake_test)
    positions = contexts.measure({ONE: SimpleNamespace(name="a run")}, tmp_path, "a split", 1024, tmp_path / "out", 1)
    assert positions == {ONE: dict(window=512, ranges=ranges[:11])}, "1024 is in the range from 513"


# ---- whole ----------------------------------------------------------------------------------------


def option(arguments, name):
    """Return the text of a flag, None where it is not given."""
    return next((text.partition("=")[2] for text in arguments if text.startswith(f"--{name}=")), None)


def pretended_sweep(config, out, runs, parallel, *options):
    """Return finished runs whose losses are a parabola of the learning rate."""
    tokens = int(option(options, "config.total_tokens"))
    views = []
    for run in runs:
        loss = 2 + float(np.log(run[tools.RATE] / 8e-3)) ** 2
        views.append(
            RunView(run=SweepRun(run, tokens // 64, 64), state="finished", tokens=tokens, validation_loss=loss)
        )
    return views


def pretended_programs(commands, parallel):
    """Return what the programs might have printed."""
    return {file: pretended_result(arguments) for file, arguments in commands.items()}


def pretended_result(arguments):
    if arguments[0] == "eval.py":
        ranges = [
            dict(first=2**i + 1, last=2 ** (i + 1), windows=2.0, streaming=1.9, difference=-0.1) for i in range(16)
        ]
        for each in ranges:
            each["difference_interval"] = (-0.2, 0.1)
        return dict(by_position=dict(window=1024, ranges=ranges))
    raise AssertionError(arguments)


@pytest.mark.long
def test_an_experiment_whose_programs_pretend_writes_its_report(corpus, tmp_path, monkeypatch):
    """All of it but what the programs do, which the test below runs."""
    run = EXPERIMENTS["sigmoid_training"]
    monkeypatch.setattr(tools, "run_script", lambda *arguments: None)
    monkeypatch.setattr(tools, "run_sweep", pretended_sweep)
    monkeypatch.setattr(tools, "run_programs", pretended_programs)
    monkeypatch.setattr(run, "write_start", lambda *arguments: None)
    monkeypatch.setattr(run, "measure_norms", lambda *arguments: {37: [1.0, 0.5]})
    results = write_whole(run, run.SMALL_PLAN._replace(n_documents=2, read=37), tmp_path, corpus)
    assert results["beyond"]["best"]["rates"] == results["beyond"]["alike"]["rates"]
    assert len(results["rates"]) == 6 and set(results["law"]["alpha 1"]) == {"37"}


@pytest.fixture
def optimized(monkeypatch):
    """The programs train for long: XLA's optimizations are on."""
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_sigmoid_training_from_its_plan_to_its_report(corpus, tmp_path, optimized):
    plan = EXPERIMENTS["sigmoid_training"].Plan((3e-3, 6e-3), 110_000, 2, 40)
    results = write_whole(EXPERIMENTS["sigmoid_training"], plan, tmp_path, corpus)
    assert len(results["rates"]) == 6
    for each in results["beyond"].values():
        assert set(each["rates"]) == set(each["positions"]) == set(each["norms"]) == set(FORMS)
    assert len(set(results["beyond"]["alike"]["rates"].values())) == 1


def test_bad_commands_are_named(commands, tmp_path):
    command = ["experiments/scaling/run.py", f"--corpus={tmp_path / 'none'}", f"--out={tmp_path / 'out'}"]
    end = commands.fork(*command)
    assert end.returncode == 1 and "Traceback" not in end.stderr
    assert re.search("/none has no train-.*: build it with `python scripts/build_corpus.py", end.stderr)
