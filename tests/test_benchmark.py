"""scripts/benchmark.py as a command: its table, files and refusals. Times are not judged here."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from heinsen.data.prepare import Settings, prepare

pytest_plugins = ["tests.run_fixtures"]

ROOT = Path(__file__).parent.parent


def benchmark(*arguments):
    command = [sys.executable, "scripts/benchmark.py", *map(str, arguments)]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling would take nearly all of the time
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_attention_is_timed_and_written_down(tmp_path):
    small = ["--lengths=32", "--heads=2", "--features=4", "--repeats=2", f"--out={tmp_path}"]
    only = "--only=heinsen chunked,heinsen chunked (forget gate),softmax (jax)"
    result = benchmark("attention", only, "--skip=heinsen chunked (forget gate),not here", *small)
    assert result.returncode == 0, result.stderr
    assert "forward+backward, float32, ms" in result.stdout
    assert "times as fast as softmax (jax)" in result.stdout
    summary = json.loads((tmp_path / "results.json").read_text())
    assert summary["device"] and summary["versions"]["jax"] and summary["left_out"] == []
    seen = {(r["name"], r["direction"], r["tokens"]) for r in summary["results"]}
    assert len(seen) == len(summary["results"]) == 4
    assert all(r["milliseconds"] >= r["fastest_milliseconds"] > 0 and r["peak_bytes"] > 0 for r in summary["results"])
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_training_step_is_timed_against_matmul(tmp_path):
    config = ["--config=configs/demo.py", "--config.sequence_length=16", "--config.model.d_model=16"]
    result = benchmark("step", *config, "--repeats=1", f"--out={tmp_path}")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "results.json").read_text())
    assert f"{summary['tokens_per_second']:,.0f} tokens/s" in result.stdout
    flops = 6 * summary["parameters"] * summary["tokens_per_step"] / summary["seconds_per_step"]
    assert summary["flops_per_second"] == pytest.approx(flops)
    assert summary["tokens_per_step"] == 16 * summary["config"]["batch_size"]
    assert summary["share_of_product_rate"] == pytest.approx(flops / summary["product_flops_per_second"])
    assert summary["mfu"] == pytest.approx(flops / summary["peak_flops_per_second"])
    assert summary["bound_seconds_per_step"] is None  # of a CPU
    assert summary["peak_bytes"] > 4 * 3 * summary["parameters"]  # at least AdamW's


@pytest.mark.long
def test_reading_batches_is_timed_with_and_without_the_check_of_ids(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200)
    prepare(Settings((str(tmp_path / "a.txt"),), "train", "bytes"), tmp_path / "data")
    config = ["--config=configs/demo.py", f"--config.data.path={tmp_path}/data", "--config.sequence_length=16"]
    result = benchmark("data", *config, "--repeats=2", f"--out={tmp_path}")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "results.json").read_text())
    assert f"{summary['tokens_per_second']['checked']:,.0f} tokens/s" in result.stdout
    assert {name: len(times) for name, times in summary["seconds"].items()} == {"checked": 2, "unchecked": 2}


@pytest.mark.long
def test_decoding_is_timed_against_the_context(tmp_path):
    sizes = dict(n_layers=2, d_model=16, n_heads=2, d_key=4, d_value=4, vocab_size=60, padded_vocab_size=64)
    config = [f"--config.model.{name}={size}" for name, size in (sizes | {"convolution": 3}).items()]
    small = ["--contexts=50,1000", "--batches=1,3", "--repeats=2", "--call_tokens=4", f"--out={tmp_path}"]
    result = benchmark("decode", *config, *small)
    assert result.returncode == 0, result.stderr
    assert "batch 3 gives" in result.stdout and "a token after 1000 takes" in result.stdout
    summary = json.loads((tmp_path / "results.json").read_text())
    taps = 2 * 2 * (2 * 12)  # two inputs of each layer's convolution, of queries, keys and values
    sizes = {(r["name"], r["batch"], r["context"]): r["state_bytes"] for r in summary["results"]}
    assert len(sizes) == len(summary["results"]) == 6
    assert sizes["heinsen", 1, 50] == sizes["heinsen", 1, 1000] == 4 * (16 + 2 * 2 * (4 * 4 + 4) + taps + 2)
    cache = lambda context: 4 * (16 + 2 + taps + 2 * 2 * 2 * 4 * (context + 4 * 4))
    assert [sizes["softmax", 1, n] for n in (50, 1000)] == [cache(50), cache(1000)]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_sampling_is_timed_against_a_sort(tmp_path):
    result = benchmark("sampling", "--config.model.vocab_size=60", "--repeats=1", f"--out={tmp_path}")
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert len(results) == 2 * 2 * 5 and all(r["milliseconds"] > 0 for r in results)
    assert "top_p 0.95, sorted" in result.stdout


@pytest.mark.parametrize("n_steps", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_stopped_benchmark_keeps_what_it_has_measured(n_steps, tmp_path):
    """Ctrl-C after some steps; a file of an earlier benchmark is not taken for that."""
    (tmp_path / "results.json").write_text("{}")
    code = f"""
import scripts.benchmarking.step as step, scripts.benchmark as benchmark
from absl import app
def interrupt(*_):
    raise KeyboardInterrupt
step.prepare_step = lambda config: (lambda: None, 1000, None)
step.prepare_product = lambda dtype: lambda: None
step.bound_of = step.compiled_bytes = lambda compiled: 1
calls = iter(range(2 * {n_steps}))
step.seconds = lambda call: interrupt() if next(calls, None) is None else 0.5
app.run(benchmark.main, flags_parser=lambda argv: benchmark.parse_flags(argv, takes_arguments=True))
"""
    command = [sys.executable, "-c", code, "step", "--config=configs/demo.py", "--repeats=9", f"--out={tmp_path}"]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert end.returncode == 1
    if n_steps:
        assert kept["steps"] == n_steps and kept["config"]["sequence_length"] == 64
        assert end.stderr.endswith(f"interrupted; {tmp_path}/results.json has what was measured\n")
    else:
        assert kept == {} and end.stderr.endswith("interrupted; nothing was written\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["speed"], "expected one of accuracy, attention, step, decode"),
        (["step", "--config.batch_sise=1"], "batch_sise"),
        (["step", "--config.model.n_heads=0"], "n_heads = 0"),
        (["attention", "--lengths=many"], "'many' is not a number above 0"),
        (["accuracy", "--sigmas=1,65"], "--sigmas: 65 is more than 64"),
        (["attention", "--lengths=0"], "'0' is not a number above 0"),
        (["decode", "--contexts=1k"], "'1k' is not a number above 0"),
        (["attention", "--dtypes=float8"], "choose float32 or bfloat16"),
        (["attention", "--only=heinsen"], "here there are heinsen chunked"),
        (["bounds"], "--target=MACHINE is missing"),
        (["bounds", "--target=h100", "--only=fast"], "there is no implementation 'fast'"),
        (["bounds", "--target=h100", "--shape=1,2,3"], "expected B,H,T,K"),
    ],
)
def test_bad_input_is_named(commands, arguments, message, tmp_path):
    result = commands.fork("scripts/benchmark.py", *arguments, f"--out={tmp_path}")
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


def test_what_to_measure_must_be_said(tmp_path):
    """In a process that has imported nothing."""
    result = benchmark(f"--out={tmp_path}")
    assert (
        result.returncode != 0 and "expected one of accuracy, attention, step, decode" in result.stdout + result.stderr
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told to keep freed memory")
def test_memory_that_a_process_has_freed_is_free():
    """Each contestant of a benchmark once found less, because freed caches were kept for the next step."""
    code = """
import os
import numpy as np
from heinsen.distributed import keep_host_memory
from scripts.benchmarking.measure import free_memory

resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
keep_host_memory()
before = resident()
np.ones(2**26)
kept = resident() - before
free_memory()
print(kept >> 20, resident() - before >> 20)
"""
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert end.returncode == 0, end.stderr
    kept, left = map(int, end.stdout.split())
    assert kept >= 500 and left < 100
