"""The first milestone on the way to 2.47: 10e9 tokens of The Pile, on one GPU: the paper's model, the gated one, GPT-2.

    python train.py --config=configs/pile_10b.py:gpt2 --workdir=runs/gpt2_10b
    python train.py --config=configs/pile_10b.py:gated --workdir=runs/gated_10b
    python train.py --config=configs/pile_10b.py --workdir=runs/pile_10b

The schedule is complete: the learning rate has decayed at the end. docs/replication.md prepares the data and says what
each run is for.
"""

from ml_collections import ConfigDict

from configs import gated_125m, gpt2_124m, pile_125m

KINDS = {"paper": pile_125m, "gated": gated_125m, "gpt2": gpt2_124m}


def get_config(kind: str = "paper") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: choose {', '.join(KINDS)}, as in --config=configs/pile_10b.py:gated")
    config = KINDS[kind].get_config()
    config.update(total_tokens=10_000_000_000, accumulation_steps=8, validate_every=250)
    return config
