"""README.md: its programs run as they stand there, its commands are ones that the programs take, and (long) work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.training.run import write_config
from tests.documents import commands, errors_of
from tests.runs import ROOT, run_config

pytest_plugins = ["tests.run_fixtures"]

TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# What the reader fills in, left out, or left to choose.
PLACEHOLDERS = {f"[--config.{any}]": "" for any in ("any.field=value ...", "any.field=value", "model.any=value ...")}
PLACEHOLDERS |= {"[": "", "]": ""}
NAMES = {"NAME": "small", "FILE.png": "positions.png", "--out=DIR": "--out=exported"}
# Too long, or a download: docs/LOG.md and tests/test_experiments.py have their smaller selves.
NOT_HERE = ("build_corpus.py", "--source=monology/", "--config=configs/pile_125m.py", "experiments/", "--tasks=")
SMALL = """
from configs import demo

def get_config():
    config = demo.get_config()
    config.data.update(path="data/mine", tokenizer="gpt2")
    config.model.update(vocab_size=50257, padded_vocab_size=50304, d_model=32, n_heads=2)
    config.optimizer.warmup_steps = 5
    config.update(total_tokens=12_000, validation_tokens=1_000, log_every=5)
    return config
"""


def lines() -> list[str]:
    """The command lines, whole, with what a reader would have filled in."""
    text = re.sub(r"\\\n\s+", "", TEXT)
    found = re.findall(r"^    ((?:python|cat) .*?)(?:  +#.*)?$", text, re.MULTILINE)
    for old, new in (PLACEHOLDERS | NAMES).items():
        found = [line.replace(old, new) for line in found]
    return found


def test_every_command_is_one_that_its_program_takes(tmp_path):
    for name in ("small", "pile_125m"):
        write_config(run_config(tmp_path / "data"), tmp_path / name)
    found = commands("\n".join("    " + line.replace("configs/small.py", "configs/demo.py") for line in lines()))
    assert len(found) >= 18
    told = [(command, error) for command, error in zip(found, errors_of(found, tmp_path), strict=True) if error]
    assert not told, "\n".join(map(str, told))


def test_the_programs_run(rng):
    names = {"heinsen": heinsen}
    exec(PROGRAMS[0], names)
    model, x = names["Attention"](n_heads=2, d_head=4), jnp.asarray(rng.standard_normal((2, 5, 6)), jnp.float32)
    assert isinstance(model, nn.Module)
    y, _ = model.init_with_output(jax.random.key(0), x)
    assert y.shape == x.shape and np.isfinite(y).all()
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    names |= dict(q=draw(2, 7, 3), k=draw(2, 7, 3), v=draw(2, 7, 4), log_v=draw(2, 7, 4), ids=jnp.arange(7) // 3)
    names |= dict(q_next=draw(2, 1, 3), k_next=draw(2, 3), log_v_next=draw(2, 4))
    names |= dict(other_state=heinsen.init_state((2,), 3, 4))
    exec(PROGRAMS[1], names)
    assert names["log_y_next"].shape == (2, 1, 4) and np.isfinite(names["log_y_next"]).all()


@pytest.mark.long
def test_the_commands_work_one_after_the_other(tmp_path, corpus):
    for name in ("heinsen", "docs", "scripts", "train.py", "eval.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs" / "small.py").write_text(SMALL)
    (tmp_path / "corpus").symlink_to(corpus)
    (tmp_path / "book.txt").write_text("abc de fgh " * 100)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    done = [line for line in lines() if not any(part in line for part in NOT_HERE)]
    assert len(done) >= 15
    for line in done:
        line = line.replace("configs/demo.py", "configs/small.py").replace("pile_125m", "small")
        line = line.replace("--steps=2000", "--steps=120").replace("=1e-3,3e-3,1e-2", "=1e-3")
        end = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert end.returncode == 0, f"{line}\n{end.stderr}"
    for made in ("exported/weights.safetensors", "loss.png", "run.png", "positions.png", "book.state"):
        assert (tmp_path / made).stat().st_size > 1000, made
