"""Import GPT-2's weights from a folder of transformers' format, as a folder that every program reads.

    hf download openai-community/gpt2 config.json model.safetensors --local-dir=gpt2
    python scripts/import_weights.py --source=gpt2 --out=imported

--source holds the config.json and the model.safetensors of a GPT2LMHeadModel, of any size. eval.py, scripts/generate.py
and train.py --config.init_from accept --out in place of a run.
"""

import dataclasses
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, refuse_address, show_help

SOURCE = flags.DEFINE_string("source", None, "Folder with config.json and model.safetensors.", required=True)
OUT = flags.DEFINE_string(
    "out", None, "Folder to write: new, empty, or an earlier export (--overwrite).", required=True
)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an earlier export in --out.")

show_help(__name__)

from configs import default
from heinsen.data.tokenizer import GPT2Tokenizer
from heinsen.export import save_folder
from heinsen.export.gpt2 import load_gpt2, read_gpt2_config
from heinsen.models import count_params
from heinsen.quantities import count
from heinsen.training.data import train_config


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    refuse_address("out")
    with exit_on_error():
        print(import_gpt2(Path(SOURCE.value), Path(OUT.value)))


def import_gpt2(source: Path, out: Path) -> str:
    """Write the folder, and return a line about it. Raises HeinsenError."""
    fields, run = read_gpt2_config(source), default.get_config()
    run.model.update(fields)
    run.update(sequence_length=fields["n_positions"], batch_size=8)  # of the windows that eval.py reads at a time
    config = train_config(run.to_dict())
    params = load_gpt2(source, config.model)
    card = _CARD.format(name=out.resolve().name, source=source, out=out)
    run = dataclasses.asdict(config)
    save_folder(out, config.model, GPT2Tokenizer.name, params, step=0, run=run, card=card, overwrite=OVERWRITE.value)
    return f"{out}: {count_params(params):,} parameters of {source}, GPT-2 with {count(fields['n_layers'], 'layer')}"


_CARD = """\
# {name}

GPT-2's model, imported from {source}, a folder of transformers' format, by scripts/import_weights.py.

    python scripts/generate.py --workdir={out} --prompt="Once upon"
    python eval.py --workdir={out} --config.data.path=DATASET
    python train.py --config=CONFIG --workdir=NEW_RUN --config.init_from={out}
"""

if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
