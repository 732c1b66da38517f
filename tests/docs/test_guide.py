"""The pages that guide a user: their programs run, and their commands are taken and (long) work as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import heinsen
from configs import pile_125m
from heinsen.config import from_mapping
from heinsen.models import count_params, hidden_states
from heinsen.ops import api, reference
from heinsen.training.config import TrainConfig
from heinsen.training.folder import write_config
from tests.documents import commands, errors_of
from tests.export.gpt2 import CONFIG, draw_weights, write_source
from tests.runs import ROOT, run_config

pytest_plugins = ["tests.run_fixtures"]

# In the order in which their commands work one after the other.
NAMES = ("quickstart", "library", "data", "training", "usage", "results", "conversion")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
# What the reader fills in, left out, or left to choose.
PLACEHOLDERS = {f"[--config.{any}]": "" for any in ("any.field=value ...", "any.field=value", "model.any=value ...")}
PLACEHOLDERS |= {"[": "", "]": "", "/NAME": "/small", "FILE.png": "positions.png", "--out=DIR": "--out=exported"}

# What the long test leaves out: downloads, clusters, compilers of other machines, and what test_experiments.py runs.
NOT_HERE = ("build_corpus.py", "=monology/", "=mit-han-lab/", "hf ", "sbatch", "--target=", "experiments/", "--tasks=")
NOT_HERE += ("--distributed", "pip ", "git ", "make ", ". .venv")
# Its small configs, in place of those of the pages.
SMALL = """
from configs import {base}

def get_config():
    config = {base}.get_config()
    config.data.update({data})
    config.model.update({vocab}{model})
    config.optimizer.warmup_steps = 5
    config.update(total_tokens=12_000, validation_tokens=1_000, log_every=5, batch_size=8, sequence_length=64)
    config.update(accumulation_steps=1, checkpoint_every=20)
    return config
"""
SIZES = "n_layers=2, d_model=32, n_heads=2, d_key=8, d_value=8, dtype='float32', remat='none'"
GPT2 = "vocab_size=50257, padded_vocab_size=50304, "  # else a run takes the vocabulary of its data
CONFIGS = {
    "small": dict(base="demo", data="path='data/mine'", vocab=GPT2, model=SIZES),
    "small_demo": dict(base="demo", data="", vocab="", model=SIZES),
    "small_gated_demo": dict(base="gated_demo", data="", vocab="", model=SIZES),
    "small_pile": dict(base="pile_125m", data="", vocab=GPT2, model=SIZES),
    "small_10b": dict(base="pile_10b", data="", vocab=GPT2, model=SIZES),
    "small_gated_125m": dict(base="gated_125m", data="", vocab=GPT2, model=SIZES),
    "small_softmax_demo": dict(base="softmax_demo", data="", vocab="", model=SIZES),
    "small_convert": dict(base="convert", data="", vocab="", model="d_key=8"),
    "small_gpt2_124m": dict(base="gpt2_124m", data="", vocab=GPT2, model=SIZES.replace("=8", "=16")),
}
SMALLER = {
    "configs/demo.py": "configs/small_demo.py",
    "configs/gated_demo.py": "configs/small_gated_demo.py",
    "configs/convert.py": "configs/small_convert.py",
    "configs/softmax_demo.py": "configs/small_softmax_demo.py",
    "=650_000": "=12_000",
    "configs/pile_125m.py": "configs/small_pile.py",
    "configs/pile_10b.py:gated": "configs/small_gated_125m.py",
    "configs/pile_10b.py:gpt2": "configs/small_gpt2_124m.py",
    "configs/pile_10b.py": "configs/small_10b.py",
    "configs/gated_125m.py": "configs/small_gated_125m.py",
    "configs/gpt2_124m.py": "configs/small_gpt2_124m.py",
    "--steps=2000": "--steps=120",
    "d_model=256": "d_model=32",
    "batch_size=64": "batch_size=8",
    "=1e-3,3e-3,1e-2": "=1e-3",
    "=300000000": "=12000",
    "warmup_steps=60": "warmup_steps=6",
    "=/shared/runs": "=runs",
    "--workers=8": "--workers=1",
}


def lines(*pages: Path) -> list[str]:
    """Return the command lines of pages, whole, with what a reader would have filled in."""
    text = re.sub(r"\\\n\s+", "", "\n".join(page.read_text() for page in pages))
    found = re.findall(r"^(?: {4}| {8})((?:python|cat|for) .*?)(?:  +#.*)?$", text, re.MULTILINE)
    for old, new in PLACEHOLDERS.items():
        found = [line.replace(old, new) for line in found]
    return found


def in_tables(*pages: Path) -> list[str]:
    """Return the command lines in the tables of pages, but those of which a part is left out."""
    rows = re.findall(r"^\|.*\|$", "\n".join(page.read_text() for page in pages), re.MULTILINE)
    return [line for row in rows for line in re.findall(r"`(python [^`]+)`", row) if "..." not in line]


def test_every_command_is_one_that_its_program_takes(tmp_path):
    for name in ("small", "mine", "gated", "mlm", "bpe", "converted"):
        write_config(run_config(tmp_path / "data"), tmp_path / name, "bytes")
    write_config(run_config(tmp_path / "data", model__attention="softmax"), tmp_path / "softmax", "bytes")
    pile = from_mapping(TrainConfig, pile_125m.get_config().to_dict())
    for name in ("pile_125m", "gpt2_10b", "gpt2"):
        write_config(pile, tmp_path / name, "gpt2")
    tables = in_tables(ROOT / "README.md", ROOT / "docs" / "results.md")
    assert len(tables) >= 7
    shown = [*lines(*PAGES, ROOT / "docs" / "planning.md"), *tables]
    text = "\n".join("    " + line.replace("configs/small.py", "configs/demo.py") for line in shown)
    for name, at_least in (("CONTRIBUTING.md", 4), ("docs/scaling.md", 5), ("docs/replication.md", 20)):
        page = re.sub(r"(?:\w+=\S+ )?(?:\.venv/bin/)?python ", "python ", (ROOT / name).read_text())
        page = re.sub(r"^.*=\.\.\. .*$", "", page, flags=re.MULTILINE)  # a command with something left to fill in
        assert len([program for program, _ in commands(page) if program.endswith(".py")]) >= at_least
        text += "\n" + page
    found = [(program, arguments) for program, arguments in commands(text) if program.endswith(".py")]
    assert len(found) >= 60
    broken = [
        ("train.py", ["--config=configs/pile_125m.py", "--config.optimizer.learning_rat=1"]),
        ("train.py", ["--config=configs/pile_125m.py", "--config.model.remat=half"]),
        ("train.py", ["--config=configs/pile_125m.py", "--plam"]),
        ("eval.py", [f"--workdir={tmp_path}/none"]),
        ("scripts/prepare_data.py", ["--tokenizer=gpt3", "--split=train", "--out=x"]),
        ("scripts/sweep.py", ["--config=configs/pile_125m.py", "--workdir=x", "--sweep.model.n_layer=1"]),
        ("scripts/export.py", ["--workdir=x", "--out=y", "word"]),
        ("experiments/scaling/run.py", ["--smal"]),
    ]
    errors = errors_of([*found, *broken], tmp_path)
    told = [(command, error) for command, error in zip(found, errors, strict=False) if error]
    assert not told, "\n".join(map(str, told))
    assert all(errors[len(found) :]), errors[len(found) :]


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_program_of_the_readme_runs(rng):
    exec(programs("README.md")[0], names := {})
    attend, x = names["attend"], jnp.asarray(rng.standard_normal((2, 7, 64)), jnp.float32)
    y, state = attend.read(x[:, :6])
    y_next, _ = attend.read(x[:, 6:], state)
    np.testing.assert_allclose(jnp.concatenate([y, y_next], axis=1), attend(x), atol=1e-5)


def test_attention_by_hand_in_flax_is_that_of_its_formula(rng):
    exec(programs("docs/library.md")[2], names := {})
    x = jnp.asarray(rng.standard_normal((2, 5, 6)), jnp.float32)
    module = names["Attention"](n_heads=2, d_head=4)
    params = module.init(jax.random.key(0), x)["params"]
    with jax.enable_x64(True):
        w = jax.tree.map(lambda p: np.asarray(p, np.float64) + 0.1, params)
        q, k, v = (np.einsum("btd,dhk->bhtk", x, w[n]["kernel"]) + w[n]["bias"][:, None] for n in "qkv")
        decays = np.cumsum(-np.log1p(np.exp(-(x @ w["gate"]["kernel"] + w["gate"]["bias"] + 4))), axis=1).swapaxes(1, 2)
        weights = np.exp(q) @ np.exp(k).swapaxes(-1, -2) * np.exp(decays[..., None] - decays[..., None, :])
        weights = np.tril(weights)
        log_y = np.log(weights @ np.exp(v) / weights.sum(-1, keepdims=True))
        want = np.einsum("bhtk,hkd->btd", log_y, w["out"]["kernel"]) + w["out"]["bias"]
    y = module.apply({"params": jax.tree.map(jnp.float32, w)}, x)
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.long
def test_a_model_of_a_run_takes_a_step_as_a_module_of_nnx(run):
    tokens = jnp.arange(24).reshape(2, 12) % 256
    names = {"workdir": run.workdir, "tokens": tokens}
    exec(programs("docs/library.md")[3], names)
    config, params, model = (names[name] for name in ("config", "params", "model"))
    hidden = jax.jit(hidden_states, static_argnums=0)
    np.testing.assert_allclose(names["hidden"], hidden(config, params, tokens)[0], atol=1e-6)
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == count_params(params)

    def loss_of(hidden, embedding):
        logits = hidden[:, :-1] @ embedding.T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    of_model = nnx.jit(lambda model: loss_of(model(tokens)[0], model.embedding[...]))
    before, grads = nnx.value_and_grad(of_model)(model)
    wanted = jax.grad(lambda params: loss_of(hidden(config, params, tokens)[0], params["embedding"]))(params)
    got = nnx.to_pure_dict(grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, wanted)
    optimizer.update(model, grads)
    assert of_model(model) < before


def test_the_program_of_the_library_page_runs(rng, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", reference.attend)  # compiles soonest
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    names = dict(q=draw(2, 3, 7, 3), k=draw(2, 3, 7, 3), v=draw(2, 3, 7, 4), log_v=draw(2, 3, 7, 4))
    names |= dict(g=-jnp.abs(draw(2, 3, 7)), ids=jnp.stack([jnp.arange(7) // 3, jnp.arange(7) // 4]))
    names |= dict(q_next=draw(2, 3, 1, 3), k_next=draw(2, 3, 3), log_v_next=draw(2, 3, 4))
    names |= dict(other_state=heinsen.init_state((2, 3), 3, 4))
    exec(programs("docs/library.md")[0], names)
    assert names["log_y_next"].shape == (2, 3, 1, 4) and np.isfinite(names["log_y_next"]).all()


def test_the_block_of_the_library_page_reads_on_from_its_state(monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", reference.attend)
    exec(programs("docs/library.md")[1], names := {})
    whole = nnx.jit(lambda block, x: block(x))(names["block"], names["x"])
    np.testing.assert_allclose(jnp.concatenate([names["prompt"], names["last"]], axis=1), whole, atol=1e-5)
    assert sum(x[0].size for x in jax.tree.leaves(names["state"])) == 8 * (8 + 1) * 8 + 2 * 3 * 48


def test_make_convert_is_what_the_page_on_it_shows():
    recipe = recipe_of("convert")
    assert len(recipe) == 7 and recipe == lines(ROOT / "docs" / "conversion.md")[:7]


# ---- whole ----------------------------------------------------------------------------------------


@pytest.fixture
def run_all(tmp_path, corpus):
    """Return a function that executes command lines in turn, in a folder like the repository with small configs."""
    for name in ("heinsen", "docs", "scripts", "experiments", "train.py", "eval.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, values in CONFIGS.items():
        (tmp_path / "configs" / f"{name}.py").write_text(SMALL.format(**values))
    (tmp_path / "corpus").symlink_to(corpus)
    (tmp_path / "pile" / "train").mkdir(parents=True)
    for file in corpus.glob("train-*"):
        (tmp_path / "pile" / "train" / file.name).symlink_to(file)
    for name, split in (("val", "validation"), ("test", "test")):
        (tmp_path / "pile" / f"{name}.jsonl.zst").symlink_to(corpus / f"{split}.jsonl.zst")
    (tmp_path / "book.txt").write_text("abc de fgh " * 100)
    sizes = CONFIG | dict(n_embd=32, n_head=2, n_layer=2, n_positions=1024, vocab_size=50257 + 47)  # of small_gpt2_124m
    write_source(tmp_path / "gpt2", sizes, draw_weights(np.random.default_rng(0), sizes))
    python = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}

    def run(found: list[str]) -> list[str]:
        done = [line for line in found if not any(part in line for part in NOT_HERE)]
        for line in done:
            for old, new in SMALLER.items():
                line = line.replace(old, new)
            end = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert end.returncode == 0, f"{line}\n{end.stderr}"
        return done

    return run


def recipe_of(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    makefile = re.sub(r"\\\n\s+", "", (ROOT / "Makefile").read_text())
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    variables = {"$(python)": "python", **{f"$({x})": re.search(rf"^{x} \?= (.*)$", makefile, re.MULTILINE)[1]
                                           for x in ("DATA", "RUN")}}  # fmt: skip
    for name, value in variables.items():
        found = found.replace(name, value)
    return [line.strip() for line in found.splitlines() if line.strip().startswith("python ")]


@pytest.mark.long
def test_the_commands_work_one_after_the_other(run_all, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", programs("docs/data.md")[0]], check=True)
    assert len(run_all(recipe_of("train"))) == 4  # `make train`, with which the pages begin
    assert len(run_all(lines(*PAGES))) >= 20
    for made in ("exported/weights.safetensors", "loss.png", "positions.png", "book.state", "runs/sweep/report.html"):
        assert (tmp_path / made).stat().st_size > 1000, made


@pytest.mark.long
def test_the_road_to_the_papers_number_works_in_small(run_all, tmp_path):
    """The validation split of The Pile itself, which is a download, is that of the corpus."""
    found = lines(ROOT / "docs" / "replication.md")
    run_all(["python scripts/prepare_data.py --source=pile/val.jsonl.zst --tokenizer=gpt2 --split=validation "
             "--out=data/pile_original"])  # fmt: skip
    assert len(run_all(found)) >= 18
    for made in ("pile_10b.png", "pile_125m.png", "exports/pile_125m/weights.safetensors"):
        assert (tmp_path / made).stat().st_size > 1000, made
