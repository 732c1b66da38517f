"""Plans by the compilers of GPUs and TPUs, where they are installed: pip install 'heinsen[plan-gpu,plan-tpu]'."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU, HAS_TPU = (importlib.util.find_spec(name) is not None for name in ("jax_cuda13_plugin", "libtpu"))
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs pip install 'heinsen[plan-gpu]'")
needs_tpu = pytest.mark.skipif(not HAS_TPU, reason="needs pip install 'heinsen[plan-tpu]'")
pytestmark = pytest.mark.long

SMALL = {"d_model": 128, "n_heads": 4, "d_key": 32, "d_value": 32, "n_layers": 3, "dtype": "bfloat16"}
BATCH, LENGTH = 16, 256


def run(script, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


def plan_stages(target, *flags, config="demo.py"):
    fields = [f"--config.model.{name}={value}" for name, value in SMALL.items()]
    fields += [f"--config.batch_size={BATCH}", f"--config.sequence_length={LENGTH}", "--config.model.vocab_size=257"]
    done = run("train.py", f"--config=configs/{config}", "--plan", f"--target={target}", *fields, *flags)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def plan(target, *flags):
    (figures,) = plan_stages(target, *flags)
    return figures


def check(figures, n_devices):
    """The products are those of the model, and the bytes at least those of the state."""
    assert figures["fits"] and figures["n_devices"] == n_devices
    costs = figures["costs"]
    products = n_devices * sum(costs["flops"].values())
    assert 6 * 0.8 < products / figures["n_params"] / (BATCH * LENGTH) < 6 * 3  # and those of attention
    assert costs["bytes"] > 2 * figures["bytes_state"]
    assert costs["kernels"] > 100
    assert figures["bound_seconds_per_step"] >= costs["bytes"] / 10e12
    assert any(" layers/" in x["name"] or " layers." in x["name"] for x in costs["costliest"])


@needs_gpu
@pytest.mark.parametrize("chip", ["a100", "h100", "h200", "b200"])
def test_a_step_on_one_gpu(chip):
    figures = plan(chip)
    check(figures, 1)
    assert figures["costs"]["collectives"] == {} and figures["device"].startswith("NVIDIA")


@needs_gpu
def test_a_step_on_a_host_of_gpus_sends_its_gradients():
    one, eight = plan("h200"), plan("h200-8")
    check(eight, 8)
    sent = eight["costs"]["collectives"]["all-reduce"]["bytes"]
    assert sent == pytest.approx(7 / 8 * 4 * eight["n_params"], rel=0.1)
    assert sum(eight["costs"]["flops"].values()) == pytest.approx(sum(one["costs"]["flops"].values()) / 8, rel=0.1)
    split = plan("h200-16", "--config.mesh.data=2", "--config.mesh.fsdp=8")
    assert split["bytes_state"] < eight["bytes_state"] / 4
    assert {"all-gather", "all-reduce"} <= set(split["costs"]["collectives"])


@needs_gpu
def test_a_conversion_is_planned_stage_by_stage():
    first, second = plan_stages("h200", "--config.accumulation_steps=1", config="convert.py:gpt2")
    assert first["device"] == second["device"] == "NVIDIA H200"
    assert first["costs"]["bytes"] < second["costs"]["bytes"]  # no logits where attention alone is taught


@needs_tpu
@pytest.mark.parametrize("target, n_devices", [("v4-8", 4), ("v5e-1", 1), ("v5e-4", 4), ("v5p-8", 4), ("v6e-8", 8)])
def test_a_step_on_a_slice_of_tpus(target, n_devices):
    figures = plan(target)
    check(figures, n_devices)
    assert ("all-reduce" in figures["costs"]["collectives"]) == (n_devices > 1)


@needs_tpu
def test_a_step_that_does_not_fit_is_said_to_need_more():
    figures = plan("v5e-1", "--config.model.d_model=8192", "--config.model.n_heads=256", "--config.model.n_layers=8")
    assert not figures["fits"] and figures["bytes_step"] > figures["bytes_device"] > 2**33


@pytest.mark.parametrize("target", [pytest.param("h200", marks=needs_gpu), pytest.param("v5p-8", marks=needs_tpu)])
def test_bounds_of_attention(target, tmp_path):
    size = ["--batch=4", "--heads=4", "--lengths=512", "--only=heinsen chunked"]
    done = run("scripts/benchmark.py", "attention", f"--target={target}", *size, f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert result["least_bytes"] == 8 * 4 * 4 * 512 * 32 * 4
    assert result["bytes"] > 1.5 * result["least_bytes"] and result["kernels"] > 10
    assert result["bound_seconds"] > result["least_seconds"] > 0
    assert f"heinsen chunked, float32, T=512, {result['kernels']:,} kernels" in done.stdout
