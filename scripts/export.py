"""Write the weights of a run's newest checkpoint as a folder that travels: safetensors, config, tokenizer, model card.

    python scripts/export.py --workdir=RUN --out=DIR [--dtype=bfloat16] [--overwrite]

eval.py, scripts/generate.py and train.py --config.init_from take DIR in place of a run. The paper's model is written
under the names of the published PyTorch module, for its `load_state_dict`.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from absl import app, flags, logging

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder to write; it must be new or empty.", required=True)
DTYPE = flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Of the weights on disk; float32 loses nothing.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace what an earlier export wrote to --out.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    import jax

    from heinsen.config import ConfigError
    from heinsen.interop import InteropError, is_export, save_folder
    from heinsen.models import count_params
    from heinsen.parallel import make_mesh
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.run import RunError, load_run
    from heinsen.weights import load_params

    workdir, out = Path(WORKDIR.value), Path(OUT.value)
    try:
        if is_export(workdir):
            raise RunError(f"{workdir} holds exported weights already: copy it, or give the run that they are from")
        config = load_run(workdir)
        step, params = load_params(workdir, config.model, make_mesh())
        manifest = save_folder(
            out,
            config.model,
            config.data.tokenizer,
            jax.device_get(params),
            step=step,
            run=dataclasses.asdict(config),
            card=model_card(config, workdir, out, step, count_params(params), DTYPE.value),
            dtype=DTYPE.value,
            overwrite=OVERWRITE.value,
        )
    except (ConfigError, CheckpointError, RunError, InteropError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{out}: {count_params(params):,} parameters of {workdir} after step {step}, {manifest.dtype}, layout "
        f"{manifest.layout}, {manifest.weights.bytes / 2**20:,.1f} MiB"
    )


def model_card(config: Any, workdir: Path, out: Path, step: int, n_params: int, dtype: str) -> str:
    """Markdown about a run's weights after `step`, from its TrainConfig and its metrics.jsonl."""
    from heinsen.interop import is_reference_model
    from heinsen.training.metrics import read_metrics

    model, name = config.model, workdir.resolve().name
    entries = [entry for entry in read_metrics(workdir) if entry["step"] <= step]
    rows = [
        ("parameters", f"{n_params:,}, {dtype}"),
        (
            "model",
            f"{model.n_layers} layers, d_model {model.d_model}, {model.n_heads} heads of {model.d_key} key and "
            f"{model.d_value} value features; vocabulary {model.vocab_size:,}, padded to {model.padded_vocab_size:,}",
        ),
        ("tokenizer", config.data.tokenizer),
        ("data", f"{config.data.path}, split {config.data.train_split}"),
        ("weights it began with", config.init_from or f"random, seed {config.seed}"),
        (
            "tokens seen",
            f"{step * config.batch_size * config.sequence_length:,}: step {step:,} of {config.total_steps:,}, of "
            f"{config.batch_size} sequences of {config.sequence_length:,} tokens",
        ),
        ("training loss", _last(entries, "loss", "bits_per_byte")),
        (
            f"validation loss, split {config.data.validation_split}, {config.validation_tokens:,} tokens at most",
            _last(entries, "validation_loss", "validation_bits_per_byte"),
        ),
    ]
    return "\n".join(
        [
            f"# {name}",
            "",
            "A language model whose attention is softmax attention with constant cost per token, trained by heinsen",
            "(https://github.com/glassroom/heinsen_attention has the method's paper and its published module).",
            "",
            "| | |",
            "|---|---|",
            *(f"| {row} | {value} |" for row, value in rows),
            "",
            "## The run",
            "",
            "`config.json` holds all its settings. As a command:",
            "",
            _code(command(config, workdir)),
            "",
            "## Use",
            "",
            _code(
                f'python scripts/generate.py --workdir={shlex.quote(str(out))} --prompt="Once upon"\n'
                f"python eval.py --workdir={shlex.quote(str(out))} --config.data.path=DATASET\n"
                f"python train.py --config=CONFIG --workdir=NEW_RUN --config.init_from={shlex.quote(str(out))}"
            ),
            "",
            "In Python:",
            "",
            _code(
                "from pathlib import Path\n"
                "\n"
                "from heinsen.interop import load_folder\n"
                "from heinsen.models import forward\n"
                "\n"
                f'config, tokenizer, params = load_folder(Path("{out}"))\n'
                "logits, state = forward(config, params, tokens)  # tokens: integers [batch, time]"
            ),
            "",
            *(_REFERENCE_USE if is_reference_model(model) else _NATIVE_USE),
            "",
        ]
    )


_REFERENCE_USE = [
    "The tensors have the names and layouts of the published PyTorch module:",
    "",
    '    module.load_state_dict(safetensors.torch.load_file("weights.safetensors"))',
]
_NATIVE_USE = [
    "The tensors have the names of heinsen's own parameters; those of all layers are stacked along their first axis.",
]


def _last(entries: list[dict[str, Any]], loss: str, bits: str) -> str:
    """The last entry that has a finite loss."""
    found = next((entry for entry in reversed(entries) if entry.get(loss) is not None), None)
    if found is None:
        return "not recorded"
    more = f", {found[bits]:.4f} bits a byte" if found.get(bits) is not None else ""
    return f"{found[loss]:.4f} nats a token{more}, at step {found['step']:,}"


def command(config: Any, workdir: Path) -> str:
    """What trains a run of this TrainConfig anew: configs/default.py and all that differs from it."""
    from configs import default

    before, now = _fields(default.get_config().to_dict()), _fields(dataclasses.asdict(config))
    words = ["python train.py --config=configs/default.py", f"--workdir={workdir}"]
    words += [f"--config.{name}={value}" for name, value in now.items() if before[name] != value]
    return " \\\n    ".join([words[0], *map(shlex.quote, words[1:])])


def _fields(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= _fields(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return flat


def _code(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    app.run(main)
