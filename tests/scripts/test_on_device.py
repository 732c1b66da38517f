"""scripts/on_device.py: its limit of time, resumption, failing parts, the report, and (long) the whole rehearsal."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heinsen.errors import InputError
from scripts.benchmarking import contestants, on_device
from scripts.benchmarking.on_device import DONE, FAILED, STOPPED, OnDeviceError

pytest_plugins = ["tests.run_fixtures"]

ROOT = Path(__file__).parents[2]
DEVICE = dict(platform="gpu", device="NVIDIA H200", versions={"jax": "1"}, count=2)

# A benchmark in the place of scripts/benchmark.py: it counts its calls, and does what its name says.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
name, *options = sys.argv[1:]
out = Path(options[-1].removeprefix("--out="))
with (out / "calls").open("a") as file:
    file.write(" ".join(options[:-1]) + "\\n")
print("on it", file=sys.stderr)
if name == "fail":
    sys.exit("error: cannot do it")
if name != "silent":
    whole = out / "results.tmp"
    whole.write_text(json.dumps({"name": name, "options": os.environ.get("HEINSEN_XLA_OPTIONS")}))
    whole.replace(out / "results.json")
if name == "hang":
    time.sleep(100)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder for the results of parts that pretend, on a device that pretends; returns run(names of parts, ...)."""
    (tmp_path / "program.py").write_text(PROGRAM)
    parts = {name: (name.split("_")[0],) for name in ("good", "other", "fail", "silent", "hang", "good_plain_xla")}
    monkeypatch.setattr(on_device, "PROGRAM", str(tmp_path / "program.py"))
    monkeypatch.setattr(on_device, "find_device", lambda: DEVICE)
    monkeypatch.setattr(on_device, "full_parts", lambda device: parts)
    monkeypatch.setattr(on_device, "_LEAST", 0.1)
    monkeypatch.setattr(on_device, "_INTERVAL", 0.01)
    monkeypatch.setattr(on_device, "REPORTS", dict.fromkeys(parts, lambda x: [f"report of {x['name']}"]))
    return tmp_path / "out", parts


def run(out, *names, seconds=60.0):
    return on_device.run(out, seconds / 60, names, small=False)


def calls(out, name):
    return (out / name / "calls").read_text().splitlines()


def test_failing_parts_are_shown_and_do_not_stop_the_others(fake, capfd):
    out, _ = fake
    with pytest.raises(OnDeviceError, match=r"^not done: fail, silent; see .*/report.md, and rerun"):
        run(out, "good", "fail", "silent")
    record = json.loads((out / "results.json").read_text())
    assert {name: part["state"] for name, part in record["parts"].items()} == {
        "good": DONE,
        "fail": FAILED,
        "silent": FAILED,
    }
    assert record["device"] == DEVICE and not record["small"] and record["parts"]["good"]["result"]["name"] == "good"
    assert record["parts"]["fail"]["result"] is None
    report = (out / "report.md").read_text()
    assert report.startswith("# 2 x NVIDIA H200\n\nNVIDIA H200; jax 1; written by") and "rehearsal" not in report
    assert "| [good](#good) | done | 0 |" in report and "| [fail](#fail) | failed | 0 |" in report
    assert "```text\nreport of good\n```" in report
    assert "`fail/log.txt`:\n\n```text\non it\nerror: cannot do it\n```" in report
    assert "fail (2 of 3): " in capfd.readouterr().err


def test_only_parts_that_are_not_done_with_the_same_flags_run_again(fake):
    out, parts = fake
    first = run(out, "good")
    assert run(out, "good") == first and len(calls(out, "good")) == 1
    second = run(out, "other")
    assert "report of good" in second and "report of other" in second, "what was done before stays in the report"
    parts["good"] = "good", "--more"
    run(out, "good")
    assert calls(out, "good") == ["", "--more"]
    for _ in range(2):
        with pytest.raises(OnDeviceError, match="not done: "):
            run(out, "fail")
    assert len(calls(out, "fail")) == 2


def test_a_part_is_stopped_when_the_time_is_over(fake):
    out, _ = fake
    with pytest.raises(OnDeviceError, match="not done: "):
        run(out, "hang", seconds=2)
    part = json.loads((out / "results.json").read_text())["parts"]["hang"]
    assert part["state"] == STOPPED and part["result"]["name"] == "hang" and 1 < part["seconds"] < 10
    report = (out / "report.md").read_text()
    assert "report of hang" in report, "what it had found so far"
    with pytest.raises(OnDeviceError, match="not done: good, other; "):
        run(out, "good", "other", seconds=0.01)
    assert not (out / "good").exists(), "without time nothing is started"


def test_a_figure_is_in_the_report_before_its_part_ends(fake):
    """An end in the middle, of the whole process, loses nothing."""
    out, parts = fake
    found = next(on_device.run_part(parts["hang"], out / "hang", 60.0))
    assert found["state"] == STOPPED and found["result"]["name"] == "hang"
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "write_record", lambda out, record: written.append(str(record)) or "")
        with pytest.raises(OnDeviceError):
            run(out, "hang", seconds=2)
    assert len(written) == 3 and "'name': 'hang'" in written[0]


def test_a_part_runs_without_xlas_options(fake):
    out, _ = fake
    report = run(out, "good", "good_plain_xla")
    found = json.loads((out / "results.json").read_text())["parts"]
    assert [found[name]["result"]["options"] for name in ("good", "good_plain_xla")] == [None, "0"]
    assert report.count("`HEINSEN_XLA_OPTIONS=0 python ") == 1


def test_results_of_another_device_are_not_mixed(fake, monkeypatch):
    out, _ = fake
    run(out, "good")
    monkeypatch.setattr(on_device, "find_device", lambda: DEVICE | {"count": 1})
    with pytest.raises(OnDeviceError, match="has results of 2 x NVIDIA H200, here is NVIDIA H200: change --out"):
        run(out, "good")


def test_the_device_is_that_of_another_process(monkeypatch):
    answer = subprocess.CompletedProcess([], 0, stdout=f"noise\n{json.dumps(DEVICE)}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert on_device.find_device() == DEVICE
    answer.returncode, answer.stderr = 1, "Traceback\nRuntimeError: no GPU\n"
    with pytest.raises(OnDeviceError, match=r"^`import jax; jax.devices\(\)` fails here: RuntimeError: no GPU$"):
        on_device.find_device()


def test_the_parts_are_benchmarks_in_the_order_of_need():
    full, small = on_device.full_parts(DEVICE), on_device.small_parts()
    assert all("--config.batch_size=64" in arguments for arguments in full.values() if arguments[0] == "step")
    assert {arguments[0] for arguments in full.values()} == on_device.REPORTS.keys()
    assert {arguments[0] for arguments in small.values()} == on_device.REPORTS.keys()
    names = [*full]
    for first, second in itertools.pairwise(("accuracy", "step", "step_gpt2", "attention", "tails", "decode")):
        assert names.index(first) < names.index(second)
    (only,) = (x.removeprefix("--only=").split(",") for x in full["tails"] if x.startswith("--only="))
    assert {*only} < {*contestants.jax_contestants()}
    assert [name for name in full if name not in on_device.full_parts(DEVICE | {"platform": "tpu"})] == [
        name for name in full if "fused" in name
    ]
    assert "--lengths=1024,8192,32768" in full["attention"]


def test_bad_input_is_named(commands, fake):
    out, _ = fake
    end = commands.fork("scripts/on_device.py", "--minutes=0", f"--out={out}")
    assert end.returncode == 1 and end.stderr == "error: --minutes=0.0: expected a number above 0\n"
    for minutes in (-1.0, np.nan, np.inf):
        with pytest.raises(InputError, match=f"^--minutes={minutes}: expected a number above 0$"):
            on_device.run(out, minutes, [], small=True)
    assert not out.exists()
    with pytest.raises(InputError, match="^--parts=speed: here there are good, other, fail, silent, hang, good_plain"):
        run(out, "good", "speed")


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
    assert list(found) == list(on_device.small_parts()) and results["small"]
    assert all(each["state"] == DONE for each in results["parts"].values())
    rows = found["accuracy"]["rows"]
    assert {row["implementation"] for row in rows} == {"chunked", "scan"}
    assert len({(row["values"], row["gated"], row["dtype"], row["sigma"]) for row in rows}) == 24
    assert all(row["passed"] for row in rows if row["implementation"] == "chunked")
    assert found["step"]["rows"][0]["mfu"] > 0 and found["step_softmax"]["rows"][0]["name"] == "softmax"
    assert found["step_gated"]["config"]["model"]["forget_gate"] == "head"
    assert {r["name"] for r in found["tails"]["results"]} == {"heinsen chunked", "heinsen chunked: tails"}
    assert {r["tokens"] for r in found["attention"]["results"]} == {256, 1024}
    assert found["losses"]["differences"]["float32"]["the first 20 steps"] < 1e-3
    assert {r["batch"] for r in found["decode"]["results"]} == {1, 32, 256}
    report = (out / "report.md").read_text()
    assert report == first.stdout.removesuffix("\n") and "a rehearsal" in report
    again = run()
    assert again.returncode == 0 and again.stdout == first.stdout and again.stderr == ""
