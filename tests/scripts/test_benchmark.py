"""scripts/benchmark.py as a command: its reports, files and refusals. Times are not judged here.

Also what it compares with: accuracy's float64, the inputs of attention, the committed losses of a CPU.
"""

import dataclasses
import itertools
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from heinsen import backend
from heinsen.config import ConfigError
from scripts.benchmarking import accuracy, attention, contestants, losses, measure, step
from scripts.benchmarking.contestants import (
    BACKWARD,
    DOCUMENTS,
    FORWARD,
    GATE,
    INPUTS,
    JaxContestant,
    Prepared,
    Shape,
    SkipError,
)
from tests.ops.oracle import Case, Form, truth
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(commands, tmp_path):
    """Run a benchmark, and return what it has printed, and its results."""

    def run(*arguments):
        end = commands.fork("scripts/benchmark.py", *arguments, f"--out={tmp_path}")
        assert end.returncode == 0, end.stderr
        return end.stdout, json.loads((tmp_path / "results.json").read_text())

    return run


# ---- attention -----------------------------------------------------------------------------------

SMALL = ["--lengths=32", "--heads=2", "--features=4", "--repeats=2"]


@pytest.mark.long
def test_attention_is_timed_and_written_down(benchmark):
    only = "--only=heinsen chunked,heinsen chunked (forget gate),softmax (jax),heinsen pallas"
    skip = "--skip=heinsen chunked (forget gate),not here"
    printed, summary = benchmark("attention", only, skip, *SMALL, "--inputs=normal,tails")
    assert "forward+backward, float32, ms" in printed
    assert re.search(r"softmax \(jax\) takes [\d.]+ \(T=32\) times as long as heinsen chunked\n", printed)
    assert re.search(r"heinsen chunked: tails takes [\d.]+ \(T=32\) times as long as heinsen chunked\n", printed)
    assert "left out: heinsen pallas (forward float32, forward+backward float32): " in printed
    assert summary["device"] and summary["versions"]["jax"]
    assert summary["command"].startswith("python scripts/benchmark.py attention ")
    seen = {(r["name"], r["direction"]) for r in summary["results"]}
    assert len(seen) == len(summary["results"]) == 8 and ("softmax (jax): tails", "forward") in seen
    for r in summary["results"]:
        assert len(r["seconds"]) == 2 and r["milliseconds"] == pytest.approx(500 * sum(r["seconds"]))
        assert r["peak_bytes"] > 0 and r["tokens"] == 32


def test_contestants_on_gpus(monkeypatch):
    """cuDNN's softmax in 16 bits, and the package jax-linear-attention by its own layout and kernels."""
    with backend.compiling_for("gpu"):
        found = contestants.jax_contestants()
    assert {*found} - {*contestants.jax_contestants()} == {"softmax (cuDNN)", "linear attention (jla)"}
    shape = Shape(2, 3, 16, 4, "float32")
    for name, why in (("softmax (cuDNN)", "16-bit"), ("linear attention (jla)", "pip install jax-linear-attention")):
        with pytest.raises(SkipError, match=why):
            found[name].prepare(shape, FORWARD)

    def linear_attention(kind, q, k, v, *, g, impl):
        assert (kind, impl, q.shape, g.shape) == ("simple_gla", "mosaic_gpu", (2, 16, 3, 4), (2, 16, 3))
        return 2 * v, None

    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "jla", SimpleNamespace(ops=SimpleNamespace(linear_attention=linear_attention)))
    arrays = found["linear attention (jla)"].draw(shape)
    y, gradients = found["linear attention (jla)"].pass_for(BACKWARD)(arrays)
    np.testing.assert_array_equal(y, 2 * arrays["v"])
    np.testing.assert_array_equal(gradients["v"], 2 * arrays["grad"])
    assert {*gradients} == {"q", "k", "v", "log_decay"}


def test_inputs_are_what_their_names_say():
    shape = Shape(2, 3, 500, 8, "float32")
    draw = lambda kind: JaxContestant(lambda q, k, v, log_decay: q, GATE + DOCUMENTS, kind).draw(shape)
    normal, drawn = draw("normal"), {kind: draw(kind) for kind in INPUTS[1:]}
    assert all(normal[name].shape == shape.axes for name in ("grad", "q", "k", "v"))
    decays, ids = normal["log_decay"], normal["segment_ids"]
    assert decays.shape == shape.axes[:-1] and np.all(decays < 0) and np.all(decays >= -1)
    assert ids.shape == (2, 1, 500) and np.all(np.diff(ids) >= 0) and len(np.unique(ids)) == 5
    for kind, arrays in drawn.items():
        changed = {name for name, x in arrays.items() if not np.array_equal(x, normal[name])}
        assert changed == {"values": {"v"}, "offsets": {"k"}}.get(kind, {"q", "k"})
    np.testing.assert_allclose(drawn["values"]["v"], 30 * normal["v"], rtol=1e-6)
    offsets = drawn["offsets"]["k"] - normal["k"]
    np.testing.assert_allclose(offsets, offsets[..., :1] + 0 * offsets, atol=1e-4)
    assert np.std(offsets[..., 0]) == pytest.approx(20, rel=0.1)
    for name in ("q", "k"):
        assert np.mean(drawn["spikes"][name] == 100) == pytest.approx(0.01, rel=0.3)
        assert np.std(np.log(np.abs(drawn["tails"][name] / normal[name] / 3))) == pytest.approx(1, rel=0.1)


@dataclasses.dataclass
class Fake:
    """A contestant with a call of so many seconds, or without one."""

    takes: float | Exception

    def prepare(self, shape, direction):
        if isinstance(self.takes, Exception):
            raise self.takes
        return Prepared(lambda: self.takes, 1)


def test_a_slow_contestant_is_timed_once_and_left_out_afterwards(monkeypatch):
    monkeypatch.setattr(measure, "seconds", lambda call: call())
    fakes = {
        "quick": Fake(0.5),
        "slow": Fake(3.0),
        "no": Fake(SkipError("not here")),
        "bad": Fake(RuntimeError("a\nb")),
    }
    settings = attention.Settings([16, 64], [], [], [], [], 1, 1, 4, repeats=2, time_limit=1.0)
    race = attention.Race(settings, fakes)
    for n in settings.lengths:
        race.run(settings.shape(n, "float32"), FORWARD)
    assert [(r["name"], r["tokens"], r["seconds"]) for r in race.results] == [
        ("quick", 16, [0.5, 0.5]),
        ("slow", 16, [3.0]),
        ("quick", 64, [0.5, 0.5]),
    ]
    report = attention.report(race.summary())
    for name, why in (("slow", "took 3.0 s at T = 16"), ("no", "not here"), ("bad", "RuntimeError: a")):
        assert f"left out: {name} (forward float32): {why}" in report


# ---- steps and decoding --------------------------------------------------------------------------


@pytest.mark.long
def test_training_steps_are_timed_against_matmul(benchmark):
    config = ["--config=configs/gated_demo.py", "--config.sequence_length=32", "--config.model.d_model=16"]
    config += ["--config.model.vocab_size=257", "--config.model.n_layers=1"]
    printed, summary = benchmark("step", *config, "--repeats=1", "--lengths=16", "--only=heinsen,softmax")
    rows = summary["rows"]
    assert [(row["name"], row["tokens"]) for row in rows] == [("heinsen", 16), ("softmax", 16)]
    assert rows[0]["parameters"] > rows[1]["parameters"], "without a gate"
    assert summary["compiler_options"] == {} and summary["left_out"] == summary["notes"] == []
    for row in rows:
        assert f" {row['tokens_per_second']:,.0f} " in printed
        flops = 6 * row["parameters"] * row["tokens_per_step"] / row["seconds_per_step"]
        assert row["flops_per_second"] == pytest.approx(flops)
        assert row["tokens_per_step"] == 32 * summary["config"]["batch_size"]
        assert row["share_of_product_rate"] == pytest.approx(flops / row["product_flops_per_second"])
        assert row["bound_seconds_per_step"] is None  # of a CPU
        assert row["peak_bytes"] > 4 * 3 * row["parameters"]  # at least AdamW's


def test_products_are_chained_in_one_program(monkeypatch):
    monkeypatch.setattr(step, "_SIZE", 64)
    monkeypatch.setattr(step, "_n_products", lambda: 5)
    matrix = np.float64(jax.random.normal(jax.random.key(0), (64, 64)) / 8)
    np.testing.assert_allclose(step.prepare_products("float32")(), np.linalg.matrix_power(matrix, 6), atol=1e-5)


def test_softmax_takes_part_in_steps_on_gpus_where_it_can(monkeypatch, tmp_path):
    config = run_config(tmp_path)
    names = lambda config, *only: [x.name for x in step.choose_cases(dataclasses.asdict(config), (), only)[0]]
    assert names(config) == ["heinsen"] and names(config, "softmax") == ["softmax"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gated = dataclasses.asdict(dataclasses.replace(config, model=dataclasses.replace(config.model, forget_gate="head")))
    (cases,) = step.choose_cases(gated, (2 * config.sequence_length,), ())
    assert [(x.name, x.config.model.forget_gate) for x in cases] == [("heinsen", "head"), ("softmax", "none")]
    assert all(x.config.tokens_per_step == config.tokens_per_step for x in cases)
    uneven = dataclasses.replace(config, model=dataclasses.replace(config.model, d_value=2 * config.model.d_key))
    assert names(uneven) == ["heinsen"]
    with pytest.raises(ConfigError, match="softmax attention needs model.d_key"):
        names(uneven, "softmax")


@pytest.mark.long
def test_another_version_is_imported_beside_this_one_and_compared(benchmark):
    printed, summary = benchmark("attention", "--old=HEAD", "--only=heinsen chunked,old chunked", *SMALL)
    assert re.search(r"heinsen chunked takes [\d.]+ \(T=32\) times as long as old chunked\n", printed)
    assert {r["name"] for r in summary["results"]} == {"heinsen chunked", "old chunked"}
    assert all(r["seconds_compiling"] > 0 for r in summary["results"])
    sizes = dict(sequence_length=16) | {"model.d_model": 16, "model.n_layers": 1, "model.vocab_size": 257}
    config = [f"--config.{name}={size}" for name, size in sizes.items()]
    _, summary = benchmark("step", "--config=configs/demo.py", *config, "--repeats=1", "--old=HEAD")
    assert [row["name"] for row in summary["rows"]] == ["heinsen", "old"]


@pytest.mark.long
def test_decoding_is_timed_against_the_context(benchmark):
    sizes = dict(n_layers=2, d_model=16, n_heads=2, d_key=4, d_value=4, vocab_size=60, padded_vocab_size=64)
    sizes |= dict(convolution=3, dtype="float32")
    config = [f"--config.model.{name}={size}" for name, size in sizes.items()]
    printed, summary = benchmark("decode", *config, "--contexts=50,1000", "--batches=1,3", "--repeats=2")
    assert len(re.findall(r"^(?:heinsen|softmax) +[13] +(?:50|1000) ", printed, re.MULTILINE)) == 6
    taps = 2 * 2 * (2 * 12)  # two inputs of each layer's convolution, of queries, keys and values
    sizes = {(r["name"], r["batch"], r["context"]): r["state_bytes"] for r in summary["results"]}
    assert len(sizes) == len(summary["results"]) == 6
    assert sizes["heinsen", 1, 50] == sizes["heinsen", 1, 1000] == 4 * (16 + 2 * 2 * (4 * 4 + 4) + taps + 2)
    cache = lambda context: 4 * (16 + 2 + taps + 2 * 2 * 2 * 4 * (context + 3 * 32))
    assert [sizes["softmax", 1, n] for n in (50, 1000)] == [cache(50), cache(1000)]
    assert all(
        r["tokens_per_second"] == pytest.approx(1e3 * r["batch"] / r["milliseconds_per_step"])
        for r in summary["results"]
    )


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["log", "real"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sigma", [1, 20])
def test_float64_agrees_with_the_tests_own(values, gated, sigma):
    case = accuracy.draw_case((2, 9, 4), sigma, gated)
    inputs = {name: getattr(case, name) for name in ("q", "k", "values", *["log_decay"] * gated)}
    state = np.zeros((2, 4, 4)), np.zeros((2, 4))
    (y, _), gradients = truth(Form(values), Case(inputs, None, True), (case.cotangent, state))
    got = accuracy.compute(case, values)
    assert got.keys() == {"y", *gradients}
    for name, expected in (gradients | {"y": y}).items():
        assert got[name].shape == expected.shape
        np.testing.assert_allclose(got[name], expected, rtol=1e-9, atol=1e-9 * np.max(np.abs(expected)))


def test_float64_holds_at_the_largest_sigma():
    for values in accuracy.FUNCTIONS:
        found = accuracy.compute(accuracy.draw_case((1, 300, 8), 64, True), values)
        assert all(np.all(np.isfinite(x)) for x in found.values())


def test_errors_are_judged_by_the_promise():
    want = {"y": np.array([5.0, -10.0]), "q": np.array([2.0, 1.0])}
    off = lambda **by: {name: x + by.get(name, 0.0) for name, x in want.items()}
    judge = lambda got, values="log", sigma=8: accuracy.judge(got, want, values, sigma)
    assert judge(off(y=1.9e-5, q=1.9e-4))["passed"]
    assert not judge(off(y=2.1e-5))["passed"] and judge(off(y=2.1e-5), sigma=9)["passed"]
    assert judge(off(y=1.9e-4), "real")["passed"] and not judge(off(y=2.1e-4), "real")["passed"]
    assert not judge(off(q=2.1e-4))["passed"]
    rounded = lambda got: accuracy.judge(got, want, "real", 1, "bfloat16")["passed"]
    assert rounded(off(y=0.078, q=0.03)) and not rounded(off(y=0.079)) and not rounded(off(q=0.032))
    broken = judge(off(q=np.nan))
    assert broken["errors"]["q"] is None and not broken["passed"]


def test_what_an_implementation_cannot_do_is_no_failure_and_a_crash_is_one(monkeypatch, tmp_path):
    def refuse(*_):
        raise NotImplementedError("not on\nthis device")

    def crash(*_):
        raise RuntimeError("broken")

    forms = {"here": accuracy.compute, "elsewhere": refuse, "broken": crash}
    monkeypatch.setattr(measure, "IMPLEMENTATIONS", tuple(forms))
    monkeypatch.setattr(accuracy, "prepare", lambda name, values: lambda case: forms[name](case, values))
    lines = accuracy.benchmark_accuracy([16], [], [], 1, 4, tmp_path).splitlines()
    assert "left out: elsewhere, log values, float32, T = 16: NotImplementedError: not on this device" in lines
    assert "FAIL: broken, real values, forget gate, bfloat16, T = 16: RuntimeError: broken" in lines
    assert lines[-1] == "24 of 24 rows within their tolerances; 8 failed to run; 8 left out"
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {(row["values"], row["gated"], row["dtype"], row["sigma"]) for row in rows} == {
        *itertools.product(("log", "real"), (False, True), ("float32", "bfloat16"), (1, 8, 64))
    }
    one = accuracy.benchmark_accuracy([16], ["bfloat16"], ["here"], 1, 4, tmp_path).splitlines()[-1]
    assert one == "12 of 12 rows within their tolerances; 0 failed to run; 0 left out"


# ---- losses --------------------------------------------------------------------------------------


def test_the_committed_losses_are_of_the_config_and_text_of_today(monkeypatch):
    reference = losses.read_reference()
    chunked, scan = (reference["losses"][form] for form in ("chunked", "scan"))
    assert len(chunked) == len(scan) == losses.STEPS and chunked != scan
    assert chunked[0] > 5.5 and chunked[-1] < 1.5
    assert losses.largest_difference(chunked, scan)["all steps"] < 1e-3
    monkeypatch.setattr(losses, "STEPS", 100)
    with pytest.raises(losses.LossesError, match="was made with another config: make it anew by `python scripts/bench"):
        losses.read_reference()


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["speed"], "expected one of accuracy, attention, step, decode"),
        (["step", "--config.batch_sise=1"], "batch_sise"),
        (["step", "--config.model.n_heads=0"], "n_heads = 0"),
        (["attention", "--lengths=many"], "'many' is not a number above 0"),
        (["attention", "--lengths=0"], "'0' is not a number above 0"),
        (["decode", "--contexts=1k"], "'1k' is not a number above 0"),
        (["attention", "--dtypes=float8"], "choose float32 or bfloat16"),
        (["attention", "--only=heinsen"], "here there are heinsen chunked"),
        (["accuracy", "--dtypes=float8"], "choose float32 or bfloat16"),
        (["accuracy", "--only=fast"], "there are chunked, pallas, scan, reference"),
        (["step", "--only=linear"], "here there are heinsen, softmax"),
        (["step", "--lengths=1000"], "does not divide a step's"),
        (["attention", "--old=nowhere"], "--old=nowhere is no commit of this checkout"),
        (["attention", "--inputs=odd"], "choose among normal, offsets, spikes, tails, values"),
        (["attention", "--target=h300"], "there is no such machine"),
    ],
)
def test_bad_input_is_named(commands, arguments, message, tmp_path):
    result = commands.fork("scripts/benchmark.py", *arguments, f"--out={tmp_path}")
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


def test_what_to_measure_must_be_said(commands, tmp_path):
    """In a process that has imported nothing."""
    result = commands.run("scripts/benchmark.py", f"--out={tmp_path}")
    assert result.returncode != 0 and "expected one of accuracy, attention, step" in result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told to keep freed memory")
def test_memory_that_a_process_has_freed_is_free():
    """Each contestant of a benchmark once found less, because freed caches were kept for the next step."""
    code = """
import os
import numpy as np
from heinsen.host import keep_host_memory
from scripts.benchmarking.measure import free_memory

resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
keep_host_memory()
before = resident()
np.ones(2**24)
kept = resident() - before
free_memory()
print(kept >> 20, resident() - before >> 20)
"""
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert end.returncode == 0, end.stderr
    kept, left = map(int, end.stdout.split())
    assert kept >= 120 and left < 40
