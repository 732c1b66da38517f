"""The first milestone on the way to 2.47: 10e9 tokens of The Pile, the paper's model or the gated one, on one GPU.

    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 --split=train --out=data/pile
    python train.py --config=configs/pile_10b.py --workdir=runs/pile_10b
    python train.py --config=configs/pile_10b.py:gated --workdir=runs/gated_10b

The schedule is complete: the learning rate has decayed at the end. docs/replication.md has the loss to beat.
"""

from ml_collections import ConfigDict

from configs import gated_125m, pile_125m

KINDS = {"paper": pile_125m, "gated": gated_125m}


def get_config(kind: str = "paper") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: choose {', '.join(KINDS)}, as in --config=configs/pile_10b.py:gated")
    config = KINDS[kind].get_config()
    config.update(total_tokens=10_000_000_000, accumulation_steps=8, validate_every=250)
    return config
