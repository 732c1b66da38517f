"""scripts/on_device.py: limits of time, resumption, failing parts, the report, and (long) the whole rehearsal.

Also the benchmarks that it alone runs: accuracy against float64, and losses beside a CPU's.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from heinsen.errors import InputError
from scripts.benchmarking import accuracy, losses, on_device, on_device_report, parts
from scripts.benchmarking.accuracy_report import report as accuracy_report
from scripts.benchmarking.parts import DONE, FAILED, NOT_STARTED, STOPPED, Outcome, Part, run_parts
from tests.ops.truth import Case as TrueCase
from tests.ops.truth import truth

pytest_plugins = ["tests.run_fixtures"]

ROOT = Path(__file__).parent.parent

# A benchmark in the place of scripts/benchmark.py: it counts its calls, and does what its name says.
PROGRAM = """
import json, subprocess, sys, time
from pathlib import Path
name, *options = sys.argv[1:]
out = Path(options[-1].removeprefix("--out="))
out.mkdir(exist_ok=True)
with (out / "calls").open("a") as file:
    file.write(" ".join(options[:-1]) + "\\n")
print("on it", file=sys.stderr)
if name == "fail":
    sys.exit("error: cannot do it")
if name != "silent":
    (out / "results.json").write_text(json.dumps({"name": name}))
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (out / "child").write_text(str(child.pid))
    time.sleep(100)
print("report of", name)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(parts, "PROGRAM", str(program))
    monkeypatch.setattr(parts, "_LEAST", 0.01)
    return tmp_path / "out"


def part(name, weight=1.0, can_stop=False, *options):
    return Part(name, f"To {name}", (name, *options), weight, can_stop)


def run_for(seconds, chosen, out):
    return run_parts(chosen, out, time.monotonic() + seconds)


def calls(out, name):
    return (out / name / "calls").read_text().splitlines()


def wait_until(moment):
    deadline = time.monotonic() + 20
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(file):
    """Whether the process whose id is in a file has ended; one that is killed does so in a moment."""
    status = Path(f"/proc/{file.read_text()}/stat")
    try:
        return status.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_failing_part_is_shown_and_does_not_stop_the_others(fake, capfd):
    outcomes = run_for(100, [part("fail"), part("silent"), part("good")], fake)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "fail": FAILED,
        "silent": FAILED,
        "good": DONE,
    }
    assert outcomes["fail"].text == "on it\nerror: cannot do it" and outcomes["fail"].result is None
    assert outcomes["good"].text == "report of good\n" and outcomes["good"].result == {"name": "good"}
    assert (fake / "fail.log").read_text() == "on it\nerror: cannot do it\n"
    lines = capfd.readouterr().err
    assert "fail (1 of 3): at most 33 s; 100 s are left in all" in lines
    assert "fail, 33 s left: error: cannot do it" in lines


def test_only_parts_that_are_not_done_with_the_same_flags_run_again(fake):
    chosen = [part("good"), part("fail"), part("other")]
    first = run_for(100, chosen, fake)
    again = run_for(100, chosen, fake)
    assert again["good"] == first["good"] and again["other"] == first["other"]
    assert len(calls(fake, "good")) == len(calls(fake, "other")) == 1 and len(calls(fake, "fail")) == 2
    run_for(100, [part("good", 1.0, False, "--more")], fake)
    assert calls(fake, "good") == ["", "--more"]


def test_a_report_of_some_parts_keeps_the_others(fake, monkeypatch):
    monkeypatch.setattr(on_device, "find_device", lambda out: dict(platform="cpu", device="here", count=1, memory=None))
    monkeypatch.setattr(on_device_report, "HEADLINES", {name: str for name in on_device.NAMES})
    on_device.run(fake, 1.0, ["losses"], small=True)
    on_device.run(fake, 1.0, ["decode"], small=True)
    rows = [line for line in (fake / "report.md").read_text().splitlines() if line.startswith("| [")]
    assert [row.split("]")[0] for row in rows] == ["| [losses", "| [decode"] and all("| done |" in row for row in rows)
    with pytest.raises(InputError, match="^--parts=step_keep needs an accelerator with 50 GiB, here is here$"):
        on_device.run(fake, 1.0, ["step_keep"], small=True)


def test_time_is_divided_by_weight_and_what_is_left_over_passes_on(fake):
    run_for(60, [part("good", 1.0, True), part("other", 3.0, True), part("last", 1.0)], fake)
    first, second = (float(calls(fake, name)[0].removeprefix("--stop_after=")) for name in ("good", "other"))
    assert first == pytest.approx(0.7 * 60 / 5, abs=0.5)
    assert 0.7 * 50 * 3 / 4 < second <= 0.5 + 0.7 * 60 * 3 / 4
    assert calls(fake, "last") == [""]


def test_a_part_ends_with_its_children_when_its_time_is_over(fake):
    outcomes = run_for(3, [part("hang"), part("good", 0.5)], fake)
    assert outcomes["hang"].state == STOPPED and 1.9 < outcomes["hang"].seconds < 3
    assert outcomes["hang"].result == {"name": "hang"}, "what it had found so far"
    assert outcomes["good"].state == DONE, "its own time is left to it"
    wait_until(lambda: has_ended(fake / "hang" / "child"))
    assert not (fake / "hang.json").exists(), "it is not done"


def test_without_time_nothing_is_started(fake):
    outcomes = run_for(0.0, [part("good")], fake)
    assert outcomes["good"] == Outcome(NOT_STARTED, 0.0, "", None) and not (fake / "good").exists()


def test_an_interruption_ends_the_running_part(fake):
    def interrupt(*_):
        raise KeyboardInterrupt

    def send():
        wait_until(lambda: child.exists() and child.read_text())
        os.kill(os.getpid(), signal.SIGALRM)

    child = fake / "hang" / "child"
    before = signal.signal(signal.SIGALRM, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_for(100, [part("hang")], fake)
    finally:
        sender.join()
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: has_ended(child))


STEP = {
    "tokens_per_second": 450_000.0,
    "mfu": 0.34,
    "tokens_per_step": 32768,
    "bound_seconds_per_step": 0.05,
}


def test_the_report_says_what_was_found_and_what_was_not(tmp_path):
    chosen = [
        Part("step", "A step", ("step", "--config=a"), 1.0),
        Part("attention", "Attention", ("attention",), 1.0),
        Part("decode", "Decoding", ("decode",), 1.0),
    ]
    timed = dict(direction="forward+backward", dtype="bfloat16", tokens=2048)
    attention = [
        dict(name="heinsen chunked", milliseconds=2.0, **timed),
        dict(name="softmax (cuDNN)", milliseconds=3.0, **timed),
        dict(name="softmax (jax)", milliseconds=9.0, **timed),
    ]
    outcomes = {
        "step": Outcome(DONE, 40.2, "printed\n", STEP),
        "attention": Outcome(STOPPED, 60.0, "the last line", {"results": attention}),
        "decode": Outcome(FAILED, 5.0, "error: no memory", None),
    }
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "step.png").touch()
    device = dict(platform="gpu", device="NVIDIA H200", count=1, memory=None)
    text = on_device_report.write(tmp_path, device, False, chosen, outcomes)
    assert text == (tmp_path / "report.md").read_text() and text.startswith("# NVIDIA H200\n")
    assert "| [step](#step) | A step | done | 40 | 450,000 tokens/s, MFU 34.0%; bound 655,360 tokens/s |" in text
    assert "![step](step/step.png)" in text and "```text\nprinted\n```" in text
    assert "bfloat16, T = 2048: heinsen chunked 2 ms, 1.5 times as fast as softmax (so far)" in text
    assert "| bfloat16 | softmax (cuDNN) | 3 |" in text and "**stopped at its limit** after 60 s" in text
    assert "| failed | 5 | - |" in text and "error: no memory" in text
    assert "rehearsal" not in text
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["device"] == device and written["parts"]["step"]["result"] == STEP
    assert written["parts"]["decode"]["state"] == FAILED


def test_parts_fit_the_device():
    device = dict(count=4, memory=140 * 2**30)
    assert tuple(each.name for each in on_device.full_parts(device)) == on_device.NAMES
    assert [each.name for each in on_device.small_parts()] == [
        each.name for each in on_device.full_parts(device | {"memory": 16 * 2**30})
    ]
    step = next(each for each in on_device.full_parts(device) if each.name == "step")
    assert "--config.batch_size=128" in step.arguments


def test_results_of_another_device_are_not_mixed(tmp_path, monkeypatch):
    record = dict(platform="gpu", device="NVIDIA H200", count=2, memory=1)
    (tmp_path / "device.json").write_text(json.dumps(record))
    here = record | {"count": 1}
    answer = subprocess.CompletedProcess([], 0, stdout=f"noise\n{json.dumps(here)}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(on_device.OnDeviceError, match="holds results of 2 x NVIDIA H200, here is NVIDIA H200: change"):
        on_device.find_device(tmp_path)
    (tmp_path / "device.json").unlink()
    assert on_device.find_device(tmp_path) == here == json.loads((tmp_path / "device.json").read_text())
    answer.returncode, answer.stderr = 1, "Traceback\nRuntimeError: no GPU\n"
    with pytest.raises(
        on_device.OnDeviceError, match=r"^`import jax; jax.devices\(\)` fails here: RuntimeError: no GPU$"
    ):
        on_device.find_device(tmp_path)


def test_bad_input_is_named(commands, tmp_path):
    end = commands.fork("scripts/on_device.py", "--parts=step,speed", f"--out={tmp_path}/out")
    assert end.returncode == 1 and end.stderr.startswith("error: --parts=speed: choose among accuracy, step, ")
    assert len(end.stderr.splitlines()) == 1
    for minutes in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(InputError, match=f"^--minutes={minutes}: expected a number above 0$"):
            on_device.run(tmp_path / "out", minutes, [], small=True)
    assert not list(tmp_path.iterdir())


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["log", "real"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sigma", [1, 20])
def test_float64_agrees_with_the_tests_own(values, gated, sigma):
    case = accuracy.draw_case((2, 9, 4), sigma, gated)
    inputs = TrueCase(case.q, case.k, case.values, True, None, None, case.log_decay)
    state = np.zeros((2, 4, 4)), np.zeros((2, 4))
    want = truth(inputs, values == "real", (case.cotangent, *state))
    got = accuracy.compute(case, values)
    gradients = [got.get(name, want.gradients[3]) for name in ("q", "k", "values", "log_decay")]
    for x, expected in zip((got["y"], *gradients), (want.y, *want.gradients), strict=False):
        assert x.shape == expected.shape
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9 * np.max(np.abs(expected)))
    assert ("log_decay" in got) == gated


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
    broken = judge(off(q=np.nan))
    assert broken["errors"]["q"] is None and not broken["passed"]


def test_what_an_implementation_cannot_do_is_no_failure_and_a_crash_is_one(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("not on\nthis device")

    def crash(*_):
        raise RuntimeError("broken")

    forms = {"here": accuracy.compute, "elsewhere": refuse, "broken": crash}
    monkeypatch.setattr(accuracy, "IMPLEMENTATIONS", forms)
    monkeypatch.setattr(accuracy, "prepare", lambda name, values: lambda case: forms[name](case, values))
    trial = accuracy.Trial(accuracy.Settings([16], [1, 8], 1, 4, stop_after=100))
    trial.run(16)
    assert [(row["values"], row["gated"], row["sigma"]) for row in trial.rows] == [
        (values, gated, sigma) for values in ("log", "real") for gated in (False, True) for sigma in (1, 8)
    ]
    assert all(row["implementation"] == "here" and row["passed"] for row in trial.rows)
    assert [(r["implementation"], r["failed"]) for r in trial.left_out] == 4 * [("elsewhere", False), ("broken", True)]
    summary = dict(heads=1, features=4, device="here", rows=trial.rows, left_out=trial.left_out)
    lines = accuracy_report(summary)
    assert "left out: elsewhere, log values, T = 16: NotImplementedError: not on this device" in lines
    assert "FAIL: broken, log values, T = 16: RuntimeError: broken" in lines
    assert lines[-1] == "8 of 8 rows within their tolerances; 4 failed to run; 4 left out"
    over = accuracy.Trial(accuracy.Settings([16], [1], 1, 4, stop_after=-1.0))
    over.run(16)
    assert not over.rows and [r["why"] for r in over.left_out] == ["no time left"] * 12


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


# ---- the whole -----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_rehearsal_runs_to_its_end_and_resumes(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "scripts/on_device.py", f"--out={out}", "--minutes=30"]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling would take most of the time
    run = lambda: subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2000)
    first = run()
    assert first.returncode == 0, first.stderr
    results = json.loads((out / "results.json").read_text())
    found = {name: each["result"] for name, each in results["parts"].items()}
    assert set(found) == {each.name for each in on_device.small_parts()} and results["small"]
    assert all(each["state"] == DONE for each in results["parts"].values())
    rows = found["accuracy"]["rows"]
    assert {row["implementation"] for row in rows} >= {"chunked", "scan", "reference"}
    assert len({(row["values"], row["gated"], row["sigma"]) for row in rows}) == 12
    assert all(row["passed"] for row in rows if row["implementation"] == "chunked")
    assert found["step"]["mfu"] > 0 and found["step_gated"]["config"]["model"]["gate"] == "head"
    assert {r["tokens"] for r in found["attention"]["results"]} == {256, 1024}
    assert found["losses"]["differences"]["float32"]["the first 20 steps"] < 1e-3
    assert {r["batch"] for r in found["decode"]["results"]} == {1, 32, 256}
    report = (out / "report.md").read_text()
    assert report == first.stdout.removesuffix("\n") and "a rehearsal" in report
    pictures = [line.split("(")[1].removesuffix(")") for line in report.splitlines() if line.startswith("![")]
    assert len(pictures) == 4 and all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    again = run()
    assert again.returncode == 0 and again.stderr.count("kept from before") == len(found)
    assert again.stdout == first.stdout
