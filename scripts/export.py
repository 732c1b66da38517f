"""Export the weights of a run's newest checkpoint as one folder: safetensors, config, tokenizer, model card.

    python scripts/export.py --workdir=RUN --out=DIR [--dtype=bfloat16] [--format=hf] [--overwrite]
    python scripts/export.py --workdir=RUN --out=DIR --format=onnx [--state=FILE] [--overwrite]

eval.py, scripts/generate.py and train.py --config.init_from accept DIR in place of a run. The paper's model is written
under the names of the published PyTorch module, for its `load_state_dict`.

With --format=hf, for models with exponential features, the folder is one that transformers loads, with the model in
PyTorch and the tokenizer; what transformers saves from it is accepted in place of a run, too. `hf upload USER/NAME DIR`
puts it on the Hugging Face Hub.

With --format=onnx, for the same models, the folder holds one decoding step for any runtime of ONNX, such as a browser's
(`heinsen/contrib/onnx`; examples/browser has a page). --state adds what scripts/generate.py --save_state wrote.
"""

import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from configs import default
from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, refuse, refuse_address, show_help

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py.", required=True)
OUT = flags.DEFINE_string(
    "out", None, "Folder to write: new, empty, or an earlier export (--overwrite).", required=True
)
DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Dtype on disk; float32 is lossless.")
FORMAT = flags.DEFINE_enum(
    "format", "heinsen", ("heinsen", "hf", "onnx"), "hf: a folder that transformers loads; onnx: one decoding step."
)
STATE = flags.DEFINE_string("state", None, "With --format=onnx: a state that scripts/generate.py saved.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an earlier export in --out.")

show_help(__name__)

import jax
from flax.traverse_util import flatten_dict

from heinsen.data.tokenizer import get_tokenizer, read_tokenizer_file
from heinsen.decoding import hash_params, load_prefix
from heinsen.export import is_export, is_reference_model, save_folder
from heinsen.models import count_params
from heinsen.parallel import make_mesh
from heinsen.quantities import format_bytes
from heinsen.training.config import TrainConfig
from heinsen.training.folder import RunError, load_run, load_tokenizer_name
from heinsen.training.metrics import read_metrics
from heinsen.weights import load_params


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    refuse_address("out")
    if FORMAT.value == "onnx" and DTYPE.value != "float32":
        refuse(f"--dtype={DTYPE.value} is no dtype of --format=onnx, which computes in float32")
    if FORMAT.value != "onnx" and STATE.value is not None:
        refuse("--state is an option of --format=onnx: other exports read the file with generate.py --load_state")
    with exit_on_error():
        workdir, write = Path(WORKDIR.value), export_step if FORMAT.value == "onnx" else export
        if is_export(workdir):
            raise RunError(f"{workdir} holds exported weights already: copy it, or give the run that they come from")
        print(write(workdir, Path(OUT.value)))


def export(workdir: Path, out: Path) -> str:
    """Write the export, and return a line about it. Raises HeinsenError."""
    tokenizer = load_tokenizer_name(workdir)
    config, for_transformers = load_run(workdir), FORMAT.value == "hf"
    step, params = load_params(workdir, config.model, make_mesh())
    n_params = count_params(params)
    manifest = save_folder(
        out,
        config.model,
        tokenizer,
        jax.device_get(params),
        step=step,
        run=dataclasses.asdict(config),
        tokenizer_file=read_tokenizer_file(tokenizer, workdir),
        card=model_card(config, workdir, out, step, n_params, for_transformers),
        dtype=DTYPE.value,
        for_transformers=for_transformers,
        overwrite=OVERWRITE.value,
    )
    return (
        f"{out}: {n_params:,} parameters of {workdir} after step {step}, {manifest.dtype}, layout "
        f"{manifest.layout}, {format_bytes(manifest.weights.bytes)}"
    )


def export_step(workdir: Path, out: Path) -> str:
    """Write one decoding step in ONNX, and return a line about it. Raises HeinsenError."""
    from heinsen.contrib import onnx  # the only use of this part of contrib

    tokenizer = get_tokenizer(load_tokenizer_name(workdir), workdir)
    run = load_run(workdir).model
    onnx.check_exportable(run)
    step, params = load_params(workdir, run, make_mesh())
    # The model may have more ids than the tokenizer, which generate.py never draws either.
    model = dataclasses.replace(run, vocab_size=tokenizer.vocab_size)
    prefix = None if STATE.value is None else load_prefix(Path(STATE.value), model, hash_params(params))
    size = onnx.save_step(out, model, tokenizer, params, step=step, prefix=prefix, overwrite=OVERWRITE.value)
    return f"{out}: one decoding step of {workdir} after step {step} in ONNX, {format_bytes(size)}"


# ---- the model card ------------------------------------------------------------------------------


def model_card(config: TrainConfig, workdir: Path, out: Path, step: int, n_params: int, for_transformers: bool) -> str:
    """Return Markdown about a run's weights after `step`, from its config and its metrics.jsonl."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(config, workdir, step, n_params))
    if for_transformers:  # the folder may go to the Hub
        place, use, tensors = ".", _TRANSFORMERS_USE, ""
    else:
        place, use = str(out), ""
        tensors = _REFERENCE_TENSORS if is_reference_model(config.model) else _NATIVE_TENSORS
    return _CARD.format(
        front_matter=_FRONT_MATTER if for_transformers else "",
        name=workdir.resolve().name,
        attention=config.model.attention,
        rows=rows,
        command=textwrap.indent(command(config, workdir), "    "),
        transformers_use=use,
        folder=shlex.quote(place),
        place=place,
        tensors=tensors,
    )


_CARD = """\
{front_matter}# {name}

A language model with {attention} attention, trained by heinsen, which implements the paper of
https://github.com/glassroom/heinsen_attention.

| | |
|---|---|
{rows}

## The run

`config.json` holds all its settings. As a command:

{command}

## Use

{transformers_use}    python scripts/generate.py --workdir={folder} --prompt="Once upon"
    python eval.py --workdir={folder} --config.data.path=DATASET
    python train.py --config=CONFIG --workdir=NEW_RUN --config.init_from={folder}

In Python:

    from pathlib import Path

    from heinsen.export import load_folder
    from heinsen.models import forward

    config, tokenizer, params = load_folder(Path("{place}"))
    logits, state = forward(config, params, tokens)  # tokens: integers [batch, time]
{tensors}"""

# The part of a model card that the Hub reads.
_FRONT_MATTER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [heinsen]
---

"""

_TRANSFORMERS_USE = """\
With transformers:

    from transformers import AutoModelForCausalLM, AutoTokenizer

    NAME = "."  # this folder, or USER/NAME on the Hub
    tokenizer = AutoTokenizer.from_pretrained(NAME, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(NAME, trust_remote_code=True)
    inputs = tokenizer("Once upon", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))

With heinsen, in a clone of its repository:

"""

_REFERENCE_TENSORS = """
The tensors have the names and layouts of the published PyTorch module:

    module.load_state_dict(safetensors.torch.load_file("weights.safetensors"))
"""

_NATIVE_TENSORS = """
The tensors have the names of heinsen's own parameters; those of all layers are stacked along their first axis.
"""


def _facts(config: TrainConfig, workdir: Path, step: int, n_params: int) -> list[tuple[str, str]]:
    """Return (name, value) of the rows of the table."""
    model = config.model
    entries = [entry for entry in read_metrics(workdir) if entry["step"] <= step]
    return [
        ("parameters", f"{n_params:,}, {DTYPE.value}"),
        (
            "model",
            f"n_layers {model.n_layers}, d_model {model.d_model}, n_heads {model.n_heads}, d_key {model.d_key}, "
            f"d_value {model.d_value}; vocabulary {model.vocab_size:,}, padded to {model.padded_vocab_size:,}",
        ),
        ("tokenizer", load_tokenizer_name(workdir)),
        ("data", f"{config.data.path}, split train"),
        ("initial weights", config.init_from or f"random, seed {config.seed}"),
        (
            "tokens seen",
            f"{step * config.tokens_per_step:,}: step {step:,} of {config.total_steps:,}, each of "
            f"{config.batch_size} sequences of {config.sequence_length:,} tokens",
        ),
        ("training loss", _last(entries, "loss", "bits_per_byte")),
        (
            f"validation loss, split {config.data.validation_split}, at most {config.validation_tokens:,} tokens",
            _last(entries, "validation_loss", "validation_bits_per_byte"),
        ),
    ]


def _last(entries: Sequence[dict[str, Any]], loss: str, bits: str) -> str:
    """Return the last finite loss in words."""
    found = next((entry for entry in reversed(entries) if entry.get(loss) is not None), None)
    if found is None:
        return "not recorded"
    more = f", {found[bits]:.4f} bits per byte" if found.get(bits) is not None else ""
    return f"{found[loss]:.4f} nats per token{more}, at step {found['step']:,}"


def command(config: TrainConfig, workdir: Path) -> str:
    """Return the command that repeats a run: configs/default.py and every field that differs from it."""
    defaults, fields = (
        flatten_dict(values, sep=".") for values in (default.get_config().to_dict(), dataclasses.asdict(config))
    )
    words = ["python train.py --config=configs/default.py", f"--workdir={workdir}"]
    words += [f"--config.{name}={value}" for name, value in fields.items() if defaults[name] != value]
    return " \\\n    ".join([words[0], *map(shlex.quote, words[1:])])


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
