"""Turn a trained softmax model into one of constant cost per token, on the data it was trained on.

    python train.py --config=configs/convert.py --config.init_from=runs/NAME --config.data.path=data/NAME \
        --workdir=runs/converted

The model is the one in init_from, a run or an export, with its attention replaced. Fields of the model that are None
here are its own, but rotary positions are left out. Queries and keys pass learned maps, and heads get a forget gate. In
the first half of the steps these alone learn, from the attention that they replace; then all weights learn from the
text (docs/conversion.md).

    python train.py --config=configs/convert.py:gpt2 --plan --target=h100

is the conversion of GPT-2 small with a tenth of the tokens of pile_10b.py. It names the model, so that no weights are
needed to plan it.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import default, gpt2_124m

KINDS = ("run", "gpt2")


def get_config(kind: str = "run") -> ConfigDict:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: choose {' or '.join(KINDS)}, as in --config=configs/convert.py:gpt2")
    config = default.get_config() if kind == "run" else gpt2_124m.get_config()
    if kind == "run":
        for name in config.model:
            config.model[name] = placeholder(config.model.get_type(name))
        config.update(total_tokens=2_000_000, sequence_length=256, batch_size=16)
        config.optimizer.warmup_steps = 20
        config.update(validate_every=200, checkpoint_every=200, validation_tokens=100_000)
    else:
        config.update(total_tokens=1_000_000_000, accumulation_steps=8, validate_every=100, checkpoint_every=100)
        config.conversion.update(forget_gate="none", position="learned")  # the teacher's
        config.optimizer.warmup_steps = 100
    config.model.update(attention="heinsen", value_domain="real", feature_map="exponential", forget_gate="head")
    config.conversion.share = 0.5
    config.optimizer.update(learning_rate=4e-3 if kind == "run" else 3e-4, final_learning_rate=3e-5)
    return config
