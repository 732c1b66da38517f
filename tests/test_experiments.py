"""The experiments: the law they fit, who takes part, and (long) each whole, from its command to its report."""

import ast
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
from absl import flags
from tqdm import tqdm

from experiments import contexts, tools
from experiments.associative_recall import contestants as recall_contestants
from experiments.associative_recall import report as recall_report
from experiments.comparison_2m.contestants import CONTEST as COMPARISON
from experiments.contest import close_together, common_rate, versus
from experiments.forgetting import report as forgetting_report
from experiments.forgetting.contestants import CONTESTS, LONG
from experiments.ladder.contestants import KINDS, Size, contest_of, parse_size
from experiments.ladder.law import Law, bootstrap, fit
from experiments.ladder.run import Rule, best_between
from experiments.sigmoid_training.contestants import CONTEST as SIGMOIDS_TRAINED
from experiments.sigmoid_training.contestants import FORMS, ONE, STEEPER, exchanged_scale, growth, write_start
from experiments.tools import ExperimentError, parse_numbers
from heinsen.export import load_folder
from heinsen.models import init_params
from tests.runs import ROOT

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


TUNED_SIZES = (Size(4, 64), Size(6, 160))
ALL_CONTESTS = {"comparison_2m": COMPARISON, "sigmoid_training": SIGMOIDS_TRAINED} | CONTESTS


@pytest.mark.parametrize("contest", ALL_CONTESTS.values(), ids=ALL_CONTESTS)
def test_contestants_have_as_many_parameters_within_1_percent(contest):
    sizes = {name: contest.parameters(name) for name in contest.contestants}
    paper = (COMPARISON if contest is COMPARISON else CONTESTS["parts"]).parameters("paper's")
    assert max(sizes.values()) < 1.01 * paper, sizes
    assert min(sizes.values()) > 0.99 * paper, sizes


def test_names_in_the_figure_of_forgetting_are_contestants():
    assert {name for contest in CONTESTS.values() for name in contest.contestants} >= forgetting_report.NAMED


@pytest.mark.parametrize("contest", ALL_CONTESTS.values(), ids=ALL_CONTESTS)
def test_contestants_differ_in_what_they_say(contest):
    models = {name: contest.train_config(name).model for name in contest.contestants}
    assert len(set(models.values())) == len(models)
    for name, model in models.items():
        said = {field.removeprefix("model."): value for field, value in contest.fields(name).items()}
        assert contest.contestants[name].items() <= said.items()
        assert all(getattr(model, field) == value for field, value in said.items())


def test_what_is_remembered_grows_with_the_text_only_where_there_is_a_cache():
    for contest in (CONTESTS["parts"], SIGMOIDS_TRAINED):
        for name in contest.contestants:
            few, many = (contest.state_size(name, n) for n in (100, 1000))
            assert (many > few) == (contest is SIGMOIDS_TRAINED or "softmax" in name)
    layers, heads, features = 4, 4, 32
    assert CONTESTS["parts"].state_size("paper's", 100) == layers * heads * (features * features + features)
    assert CONTESTS["parts"].state_size("softmax", 100) == layers * heads * 2 * 100 * features


def test_the_law_of_sigmoid_attention_over_a_window():
    t = np.arange(1, 513)
    assert growth(ONE, 512) == pytest.approx(1 / 2)
    assert growth("alpha 0.5", 512) == pytest.approx(np.sqrt(np.mean(t)) / 2)
    assert growth(STEEPER, 512) == pytest.approx(np.sqrt(np.mean(1 / t)) / 2)
    n_sigmoids = [sum(1 / (1 + np.exp(np.log(n))) for _ in range(n)) for n in t]
    assert growth("alpha 0, bias -log n", 512) == pytest.approx(np.sqrt(np.mean(np.square(n_sigmoids))))


@pytest.mark.parametrize("form", [ONE, STEEPER])
def test_initial_outputs_are_exchanged(form, tmp_path, rng):
    """With the factor in W2, what a layer's W2 makes of equal tokens has the scale of the other form."""
    write_start(tmp_path / "start", form, exchanged_scale(form))
    _, _, params = load_folder(tmp_path / "start")
    own = init_params(SIGMOIDS_TRAINED.train_config(form).model, jax.random.key(1))
    scale = params["layers"]["w2"]["kernel"] / own["layers"]["w2"]["kernel"]
    other = {ONE: STEEPER, STEEPER: ONE}[form]
    np.testing.assert_allclose(scale * growth(form, 512) / growth(other, 512), 1, rtol=1e-5)
    del params["layers"]["w2"], own["layers"]["w2"]
    jax.tree.map(np.testing.assert_array_equal, params, dict(own))


def test_the_common_rate_is_the_best_for_all_where_none_has_crashed():
    losses = {"a": {1e-3: 2.0, 2e-3: 1.0, 4e-3: 0.5}, "b": {1e-3: 2.5, 2e-3: 3.0, 4e-3: np.inf}}
    assert common_rate(losses) == 2e-3
    with pytest.raises(ExperimentError, match="a, b: one of them has crashed at each"):
        common_rate({"a": {1e-3: np.inf, 2e-3: 1.0}, "b": {1e-3: 1.0, 2e-3: np.inf}})


def test_differences_are_those_of_equal_seeds():
    bits = {"a": {1: 2.0, 2: 3.0, 3: 4.0}, "b": {1: 2.1, 2: 3.2, 3: 4.3}}
    text = versus(bits, "b", "a")  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    assert text == "+0.2000 [-0.0484, +0.4484]"


def test_neighbors_touch_where_their_ranges_over_seeds_do():
    bits = {"a": {1: 2.0, 2: 3.0}, "b": {1: 3.1, 2: 3.4}, "c": {1: 3.3, 2: 3.5}, "d": {1: 1.0}}
    assert close_together(bits) == ["b", "c"]
    assert close_together(bits | {"e": {1: 1.9, 2: 2.0}}) == ["a", "b", "c", "e"]
    assert versus(bits | {"a": {1: 2.0, 2: 3.0, 3: 4.0}}, "a", "b").startswith("-0.7500"), "of equal seeds alone"


def test_results_name_no_folder_above_the_repository(tmp_path):
    assert tools.from_root(ROOT / "runs" / "x") == "runs/x"
    assert tools.from_root(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("size", [Size(4, 64), pytest.param(Size(8, 192), marks=pytest.mark.long)])
def test_the_kinds_of_the_ladder_are_of_equal_size(size):
    contest = contest_of(size)
    paper = contest.parameters("paper's")
    n_layers, d = size
    assert paper == n_layers * (6 * d * d + 7 * d) + 2 * d * d + 2 * d + 264 * d + 2 * d
    assert all(abs(contest.parameters(kind) / paper - 1) < 0.01 for kind in contest.contestants)


@pytest.mark.long
def test_the_models_of_the_committed_ladder_are_found_again():
    results = json.loads((ROOT / "experiments" / "ladder" / "results.json").read_text())
    for run in (*results["runs"], *results["next"]):
        assert contest_of(parse_size(run["size"])).parameters(run["kind"]) == run["n_params"], run


@pytest.mark.parametrize("text", ["4", "0x128", "4x100", "4x-32", "3x64", ""])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ExperimentError, match="LAYERSxWIDTH"):
        parse_size(text)


def test_the_best_learning_rate_lies_between_those_tried(rng):
    """The vertex of a parabola is found again; ends of a grid and crashed runs have none."""
    best, slope = np.exp(rng.uniform(-7, -5)), rng.uniform(0.01, 1)
    losses = {best * x: 2 + slope * np.log(x) ** 2 for x in np.exp([-1.9, -0.4, 0.3, 1.1])}
    assert best_between(losses) == pytest.approx(best)
    rising = {1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}
    assert best_between(rising) == 1e-3
    assert best_between({1e-3: 2.1, 2e-3: 2.0, 4e-3: np.inf}) == 2e-3


def test_learning_rates_of_the_ladder_are_a_power_of_the_width(rng):
    rates = dict(zip(KINDS, np.exp(rng.uniform(-7, -5, len(KINDS))), strict=True))
    power = rng.uniform(-2, 1)
    tuned = {size: {kind: {r * (size.width / 64) ** power: 2.0} for kind, r in rates.items()} for size in TUNED_SIZES}
    rule = Rule(tuned)
    for kind, rate in rates.items():
        assert rule.powers()[kind] == pytest.approx(power)
        assert rule.rate(kind, Size(4, 256)) == pytest.approx(rate * 4**power, rel=1e-2)


def test_names_with_commas_are_chosen_by_a_list_flag():
    known = ["a", "a, b", "c"]
    values = flags.FlagValues()
    flags.DEFINE_list("names", None, "", flag_values=values)
    values(["program", f"--names={tools.format_names(['c', 'a, b', 'c'])}"])
    assert tools.choose("names", values.names, known) == ["a, b", "c"]
    assert tools.choose("names", None, known) == known
    with pytest.raises(ExperimentError, match="--names: 'b': choose a,\"a, b\",c"):
        tools.choose("names", ["b"], known)


@pytest.mark.parametrize("texts", [[], ["1", "0"], ["2", "inf"], ["nan"], ["x"]])
def test_numbers_that_are_none_are_refused(texts):
    with pytest.raises(ExperimentError, match="--flag: '.*' is not a positive number"):
        parse_numbers("flag", texts)


RUNS = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/run.py"))


def assigned(program, name):
    """The value of a constant in a program's source, and the names of its flags."""
    tree = ast.parse((ROOT / program).read_text())
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == name]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return ast.literal_eval(value), {call.args[0].value for call in calls if call.func.attr.startswith("DEFINE_")}


@pytest.mark.parametrize("experiment", RUNS)
def test_small_settings_are_flags_of_the_experiment(experiment):
    small, own = assigned(f"experiments/{experiment}/run.py", "SMALL_FLAGS")
    assert small.keys() < own and all(isinstance(text, str) for text in small.values())


def test_small_sets_the_flags_that_are_not_given(monkeypatch, capsys):
    values = flags.FlagValues()
    flags.DEFINE_string("out", "runs/x", "", flag_values=values)
    flags.DEFINE_integer("tokens", None, "", flag_values=values)
    flags.DEFINE_list("rates", ["1"], "", flag_values=values)
    values(["program", "--tokens=7"])
    monkeypatch.setattr(tools.flags, "FLAGS", values)
    tools.execute(
        lambda out, parallel: f"{out} {values.tokens} {values.rates}", values.out, 1, {"rates": "2,3", "tokens": "8"}
    )
    assert capsys.readouterr().out == "runs/x_small 7 ['2', '3']\n"


def test_too_few_tokens_are_refused_before_anything_is_prepared():
    tools.check_tokens(COMPARISON.get_config(), tuning_tokens=None, tokens=51 * 4096)
    with pytest.raises(ExperimentError, match="--tokens=204,800: .*warmup_steps = 50 does not fit a run of 50 steps"):
        tools.check_tokens(COMPARISON.get_config(), tokens=50 * 4096)


def test_the_time_left_is_that_of_the_training_not_done_here(rng):
    """What an earlier command has trained counts as done, and tells nothing of the speed."""
    total, earlier, here, seconds = 1e12, *rng.uniform(1e11, 3e11, 2), rng.uniform(100, 1000)
    training = tools.Training(total)
    assert training.add(earlier, 0.0, 1.0).endswith(f"{earlier / total:.0%} of the experiment's training is done")
    line = training.add(here, here, seconds)
    left = tqdm.format_interval((total - (earlier + here)) / here * (1.0 + seconds))
    assert line.startswith(f"{(earlier + here) / total:.0%} of") and line.endswith(f"done, ETA {left}")
    assert training.add(total, total, 1.0) == "100% of the experiment's training is done", "grids were extended"


def test_results_of_programs_are_kept(tmp_path, capfd):
    """The same command resumes: only what is missing, or has other arguments, or has failed, is computed again."""
    ran = tmp_path / "ran"
    script = "import sys; print('said', sys.argv[2], file=sys.stderr); open(sys.argv[1], 'a').write(sys.argv[2]); "
    script += "print(0); print([int(sys.argv[2])])"
    commands = {tmp_path / "kept" / f"{i}.json": ["-c", script, str(ran), str(i)] for i in (1, 2)}
    wanted = dict(zip(commands, ([1], [2]), strict=True))
    assert tools.run_programs(commands, 1) == wanted
    said = capfd.readouterr().err
    assert "said 1\n" in said and "1 of 2 programs done, ETA " in said
    assert tools.run_programs(commands, 2) == wanted and ran.read_text() == "12"
    first, second = commands
    first.unlink()
    commands[second] = ["-c", script, str(ran), "3"]
    assert list(tools.run_programs(commands, 1).values()) == [[1], [3]] and ran.read_text() == "1213"
    commands[first] = ["-c", script, str(ran), "x"]
    for _ in range(2):  # what has failed starts again
        assert list(tools.run_programs(commands, 1, may_fail=True).values()) == [None, [3]]
    assert ran.read_text() == "1213xx"
    with pytest.raises(ExperimentError, match="has failed, see above"):
        tools.run_programs(commands, 1)


EXPERIMENT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from experiments import tools
from absl import flags
flags.FLAGS(["experiment"])
tools.execute(lambda out, parallel: tools.run_script("-c", {program!r}), "out", 1)
"""
SLOW_TO_SAVE = """
import pathlib, signal, time
def save(number, frame):
    time.sleep(1)
    pathlib.Path({file!r}).write_text(str(number))
    raise SystemExit(0)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("send", "number"), [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)], ids=["SIGTERM", "Ctrl-C"]
)
def test_an_interrupted_experiment_waits_for_its_program_to_save(send, number, tmp_path):
    """SIGTERM reaches the experiment alone, Ctrl-C the program as well."""
    saved = tmp_path / "saved"
    code = EXPERIMENT.format(program=SLOW_TO_SAVE.format(file=str(saved)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    experiment = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with experiment:
        assert "started\n" in iter(experiment.stderr.readline, "")
        send(experiment.pid, number)
        assert experiment.stderr.readline() == f"{tools.RESUME}\n"
        assert saved.read_text() == str(int(number))
    assert experiment.returncode == 1


def draw_recall_runs(rng, grid, failed=()):
    runs = []
    for kind in grid["kinds"]:
        for width in grid["widths"]:
            for rate in grid["rates"]:
                for seed in grid["seeds"]:
                    accuracy = {n: float(rng.random()) for n in (4, 8, 32)}
                    run = dict(kind=kind, width=width, rate=rate, seed=seed, accuracy=accuracy)
                    run |= dict(parameters=width**2, steps=9, tokens=int(rng.integers(10**6)), loss=1.0, seconds=3.0)
                    runs.append(run | ({"accuracy": None} if (kind, rate) in failed else {}))
    return runs


def test_the_report_of_recall_shows_the_best_rate_on_the_lengths_of_training(rng, tmp_path):
    grid = dict(kinds=["softmax", "heinsen"], widths=[32, 64], rates=[1e-3, 1e-2], seeds=[1, 2], pairs=[4, 8])
    grid |= dict(test_pairs=[32], n_heads=2, n_steps=10, spread=16)
    runs = draw_recall_runs(rng, grid, failed={("heinsen", 1e-2)})
    text = recall_report.write(tmp_path, grid, runs)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "recall.png").stat().st_size > 10_000 and text.startswith((tmp_path / "report.md").read_text())
    for model in results["models"]:
        own = [run for run in runs if (run["kind"], run["width"]) == (model["kind"], model["width"])]
        of_rate = lambda rate, own=own: [run["accuracy"] for run in own if run["rate"] == rate]
        means = {
            rate: np.mean([[a[4], a[8]] for a in of_rate(rate) if a]) for rate in grid["rates"] if any(of_rate(rate))
        }
        assert model["rate"] == max(means, key=means.get)
        assert model["accuracy"]["32"] == pytest.approx(np.mean([a[32] for a in of_rate(model["rate"])]))
        assert f"{model['accuracy']['32']:.1%}" in text
        if model["kind"] == "heinsen":  # h_s and h_z of two layers of two heads, and e of the positions
            features = model["width"] // 2
            assert model["state"] == 2 * 2 * (features + 1) * features + model["width"]
        else:
            assert model["state"] == (2 * 2 * 8 * 16 + 1) * model["width"], "keys and values of 128 tokens, and e"
    again = recall_report.write(tmp_path, grid, runs)
    assert again == text and json.loads((tmp_path / "results.json").read_text()) == results
    with pytest.raises(ExperimentError, match="heinsen of width 32 has failed at all learning rates"):
        recall_report.write(tmp_path, grid, draw_recall_runs(rng, grid, {("heinsen", rate) for rate in grid["rates"]}))


def test_contestants_of_recall_differ_in_what_they_say():
    models = [recall_contestants.model_config(name, 64, 2) for name in recall_contestants.CONTESTANTS]
    assert len(set(models)) == len(models)
    for model, fields in zip(models, recall_contestants.CONTESTANTS.values(), strict=True):
        assert all(getattr(model, name) == value for name, value in fields.items())
        assert (model.vocab_size, model.n_layers, model.d_key, model.d_value) == (8192, 2, 32, 32)


def by_position(rng, n_ranges=12):
    """As in eval.py's summary; in streaming the last range is significantly worse."""
    ranges = []
    for i in range(n_ranges):
        windows, streaming = rng.uniform(1, 2, 2)
        worse = i == n_ranges - 1
        interval = (0.1, 0.2) if worse else (-0.1, 0.2)
        each = dict(first=2 ** (i - 1) + 1 if i else 1, last=None if worse else 2**i, tokens=5, windows=windows)
        ranges.append(each | dict(streaming=streaming, difference=streaming - windows, difference_interval=interval))
    return dict(window=512, ranges=ranges)


def test_the_report_on_forgetting_has_every_contestant_and_every_range_of_positions(rng):
    names, contests = ["paper's", "gate"], {}
    for question in forgetting_report.QUESTIONS:
        bits = {name: {seed: rng.uniform(1, 2) for seed in (1, 2, 3)} for name in names}
        contests[question] = dict(
            tuning={name: {1e-3: 2.0, 3e-3: np.inf} for name in names},
            fields={"paper's": {}, "gate": dict(gate="head")},
            bits_per_byte=bits,
            sources={"Books": dict.fromkeys(names, 2.5)},
            parameters=dict.fromkeys(names, 12345),
            state=dict.fromkeys(names, [7, 8765]),
        )
    contexts = dict(windows={name: by_position(rng) for name in names}, streams={"gate": by_position(rng)})
    results = dict(machine="2 CPU cores", jax="1", tokens=100, contests=contests, contexts=contexts)
    results["speed"] = {name: {"512": 100.0, "8192": 50.0} for name in names}
    text = "\n".join(forgetting_report.report(results))
    for question, found in contests.items():
        assert f"## {forgetting_report.QUESTIONS[question]}" in text
        for name, seeds in found["bits_per_byte"].items():
            assert f"{np.mean(list(seeds.values())):.4f}" in text
            everyone = contests["parts"]["bits_per_byte"] | found["bits_per_byte"]
            assert name == "paper's" or versus(everyone, name, "paper's") in text
    assert "| 12,345 | 7 / 8,765 | 100 / 50 | 0.001 | gate=head |" in text and "| **2.0000** | inf |" in text
    contexts["windows"]["gate"]["ranges"] = contexts["windows"]["gate"]["ranges"][:-1]  # shorter documents
    text = "\n".join(forgetting_report.report(results))
    assert re.search(r"^\| gate, windows \|.*\|  \|$", text, re.MULTILINE)
    last = contexts["streams"]["gate"]["ranges"][-1]
    assert f"| {last['streaming']:.3f} ({last['difference']:+.3f}*) |" in text
    assert "| to 512 | to 1,024 | 1,025 on |" in text and "| to 256 |" not in text
    results["contexts"] = dict(windows={}, streams={})
    assert "Longer contexts" not in "\n".join(forgetting_report.report(results))


def test_long_documents_are_found_and_cut(rng, tmp_path):
    texts = ["a" * n for n in rng.integers(50, 200, 40)] + ["é" * 100]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "train-1.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    long, last = [text for text in texts if len(text.encode()) >= 99], tmp_path / "train-1.jsonl.zst"
    assert contexts.find_long(last, 1000, 99) == [
        *(text[:99] for text in long[:-1]),
        "é" * 49,
    ]
    assert contexts.find_long(last, 3, 99) == [text[:99] for text in long[:3]]
    for documents, message in ((0, "two files train-"), (1, "no document of 500 bytes")):
        if documents:
            (tmp_path / "train-0.jsonl.zst").write_bytes(b"")
        with pytest.raises(ExperimentError, match=message):
            contexts.prepare(tmp_path, tmp_path / "out", 5, 500)


def test_losses_after_a_document_was_cut_are_left_out(rng, monkeypatch, tmp_path):
    """A token of its end follows, which a model of a text that goes on does not expect."""
    names = ["gate, output gate, convolution", "softmax, GPT-2's block, output gate"]
    contest = CONTESTS["combined"]
    runs = [SimpleNamespace(name=name, run=SimpleNamespace(point=contest.fields(name))) for name in names]
    found = by_position(rng)

    def fake_test(out, folders, parallel, with_positions, split_of):
        assert [split_of(run) for run in folders[tmp_path]] == ["long", "shorter"]
        return {run.name: dict(by_position=found) for run in runs}

    monkeypatch.setattr(contexts, "test", fake_test)
    documents = contexts.Documents("long", 1024), contexts.Documents("shorter", 128)
    positions = contexts.by_position(contest, names, tmp_path, runs, documents, tmp_path / "out", 1)
    assert positions[names[0]] == found | {"ranges": found["ranges"][:11]}, "1024 is in the range from 513"
    assert [each["last"] for each in positions[names[1]]["ranges"]][-1] == 128


# ---- whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "figures", "results"),
    [
        ("comparison_2m", ("costs", "curves", "positions", "recall"), ("bits_per_byte", "decoding", "positions")),
        pytest.param(
            *("forgetting", ("contexts", "state_size"), ("contests", "contexts", "speed")), marks=pytest.mark.long
        ),
        ("ladder", ("ladder",), ("laws", "next", "prediction", "runs")),
    ],
)
def test_an_experiment_whose_programs_pretend_writes_its_report(experiment, figures, results, corpus, tmp_path):
    """All of it but what the programs do, which the long tests below run."""
    command = [sys.executable, "-m", "tests.pretend", experiment, f"--corpus={corpus}", f"--out={tmp_path}"]
    small = [
        "--sizes=2x32,2x64",
        "--tokens=1e6,2e6,4e6",
        "--next=2x96",
        "--tuned_sizes=2x32,2x64",
        "--checked_size=2x64",
    ]
    command += small if experiment == "ladder" else ["--longest=300", "--documents=2"]
    end = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert end.returncode == 0, end.stderr
    report, found = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "results.json").read_text())
    assert report in end.stdout and set(results) <= set(found)
    for figure in figures:
        assert f"({figure}.png)" in report and (tmp_path / f"{figure}.png").stat().st_size > 10_000
    assert " nan" not in report and "None" not in report


@pytest.mark.long
def test_the_ladder_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/ladder/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--sizes=2x32,2x64,2x96"]
    command += ["--next=4x64", "--tokens=300000,330000", "--learning_rates=3e-3", "--tuned_sizes=2x32,2x64"]
    command += ["--checked_size=2x64"]
    end = commands.run_experiment(*command, n_programs=3 * (2 + 3 + 3 * 2 + 1))
    assert end.returncode == 0, end.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["runs"]) == 18 and len(results["next"]) == 3
    assert results["prediction"] == json.loads((tmp_path / "prediction.json").read_text())["predictions"]
    report = (tmp_path / "report.md").read_text()
    assert "a miss of" in report and report in end.stdout
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    before = (tmp_path / "prediction.json").stat().st_mtime_ns
    assert commands.run(*command).returncode == 0
    assert (tmp_path / "prediction.json").stat().st_mtime_ns == before, "what was predicted stays"


@pytest.mark.long
def test_the_comparison_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/comparison_2m/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--learning_rates=3e-3"]
    command += ["--tuning_tokens=220000", "--tokens=220000", "--documents=2", "--longest=300", "--recall_steps=101"]
    command += ["--speed_lengths=32,64", "--contexts=32,64"]
    end = commands.run_experiment(*command, n_programs=7 * len(COMPARISON.contestants))
    assert end.returncode == 0, end.stderr
    results, report = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.md").read_text()
    assert report in end.stdout
    for what in ("bits_per_byte", "positions", "recall", "decoding", "speed"):
        assert set(results[what]) == set(COMPARISON.contestants)
    for figure in ("curves", "costs", "positions", "recall"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


@pytest.mark.long
def test_sigmoid_training_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/sigmoid_training/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--tokens=110000"]
    command += ["--learning_rates=3e-3,6e-3", "--documents=2", "--read=40"]
    end = commands.run_experiment(*command, n_programs=2 * (4 + 2) + 2 * 4)
    assert end.returncode == 0, end.stderr
    results, report = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.md").read_text()
    assert report in end.stdout
    assert set(FORMS) < set(results["rates"])
    for each in results["beyond"].values():
        assert set(each["rates"]) == set(each["positions"]) == set(each["norms"]) == set(FORMS)
    assert len(set(results["beyond"]["alike"]["rates"].values())) == 1
    for figure in ("lengths", "rates"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


@pytest.mark.long
def test_forgetting_from_its_command_to_its_report(commands, corpus, tmp_path):
    command = ["experiments/forgetting/run.py", f"--corpus={corpus}", f"--out={tmp_path}", "--contests=combined"]
    command += ["--seeds=2", "--learning_rates=3e-3", "--tuning_tokens=110000", "--tokens=110000"]
    command += ["--documents=2", "--longest=300", "--speed_lengths=32,64"]
    contestants = CONTESTS["combined"].contestants
    end = commands.run_experiment(*command, n_programs=5 * len(contestants) + 8)
    assert end.returncode == 0, end.stderr
    results, report = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.md").read_text()
    assert report in end.stdout and set(results["contests"]) == {"combined"}
    assert set(results["contests"]["combined"]["bits_per_byte"]) == set(contestants)
    assert set(results["contexts"]["windows"]) == set(results["contexts"]["streams"]) == set(LONG["combined"])
    for figure in ("state_size", "contexts"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize(
    "argument, message",
    [
        ("--kinds=softmax,hyena", "--kinds: 'hyena': choose softmax,softmax-rotary,softmax-learned,linear,heinsen"),
        ("--widths=6", "--widths: 6 does not divide into 2 heads of even size"),
        ("--tokens=1e5", "the warm-up alone takes 100"),
    ],
)
def test_bad_grids_of_recall_are_named(commands, tmp_path, argument, message):
    end = commands.run("experiments/associative_recall/run.py", f"--out={tmp_path / 'out'}", argument)
    assert end.returncode == 1 and message in end.stderr and "Traceback" not in end.stderr


def test_a_small_experiment_from_its_command_to_its_report(commands, tmp_path):
    """The one that trains without a corpus; the others are long tests."""
    command = ["experiments/associative_recall/run.py", f"--out={tmp_path}", "--small", "--kinds=heinsen-gate"]
    end = commands.run(*command, "--pairs=1", "--test_pairs=2,3", "--tokens=52000")
    assert end.returncode == 0 and "1 of 1 programs done" in end.stderr, end.stderr
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert set(run["accuracy"]) == {"1", "2", "3"}
    assert (tmp_path / "report.md").read_text() in end.stdout and (tmp_path / "recall.png").exists()


@pytest.mark.long
def test_recall_from_its_command_to_its_report(commands, tmp_path):
    command = ["experiments/associative_recall/run.py", f"--out={tmp_path}", "--kinds=softmax,heinsen", "--widths=8"]
    command += ["--learning_rates=1e-3,1e-2", "--pairs=1,2", "--test_pairs=3", "--tokens=78000"]
    end = commands.run_experiment(*command, n_programs=4)
    assert end.returncode == 0, end.stderr
    assert "4 of 4 programs done" in end.stderr
    results, report = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.md").read_text()
    assert len(results["runs"]) == 4 and set(results["runs"][0]["accuracy"]) == {"1", "2", "3"}
    assert report in end.stdout and (tmp_path / "recall.png").stat().st_size > 10_000
    kept = sorted((tmp_path / "runs").glob("*.json"))
    kept[0].unlink()
    end = commands.run_experiment(*command, n_programs=1)
    assert end.returncode == 0 and "1 of 1 programs done" in end.stderr, end.stderr
    again = json.loads((tmp_path / "results.json").read_text())
    for run in (*results["runs"], *again["runs"]):
        run.pop("seconds")
    assert again == results, "one run was repeated, and the others were kept"


@pytest.mark.parametrize(
    "start, arguments, message",
    [
        ("run", ["ladder/run.py", "--corpus={}", "--sizes=4x100"], "a multiple of 32"),
        (
            "fork",
            ["ladder/run.py", "--corpus={}", "--tuned_sizes=4x128,6x128"],
            "expected two sizes of different width",
        ),
        ("run", ["forgetting/run.py", "--corpus={}/none"], "/none has no train-*.jsonl.zst: build it with"),
        pytest.param("fork", ["forgetting/run.py", "--corpus={}"], "has failed", marks=pytest.mark.long),
        (
            "run",
            ["comparison_2m/run.py", "--corpus={}", "--contestants=gate, parts"],
            "'parts': choose paper's,gate,\"gate, par",
        ),
        ("fork", ["comparison_2m/run.py", "--corpus={}", "--contestants=gate"], 'is about "paper\'s", too: add it'),
    ],
)
def test_bad_commands_are_named(commands, tmp_path, start, arguments, message):
    """Each script once in a new process, then in forks, which start sooner."""
    (tmp_path / "train-0.jsonl.zst").write_text("no text")
    script, *rest = (argument.format(tmp_path) for argument in arguments)
    end = getattr(commands, start)(f"experiments/{script}", f"--out={tmp_path / 'out'}", *rest)
    assert end.returncode == 1 and message in end.stderr and "Traceback" not in end.stderr
