"""The contestants, and the fields of the model in which they differ."""

from pathlib import Path

from experiments.attention_comparison import config
from experiments.contest import Contest
from heinsen.sweep.space import Value
from heinsen.training.run import TrainConfig

# Two layers of GPT-2's block have as many parameters as four of the paper's.
CONTESTANTS: dict[str, dict[str, Value]] = {
    "heinsen": dict(attention="heinsen"),
    "softmax": dict(attention="softmax"),
    "sigmoid": dict(attention="sigmoid"),
    "linear": dict(attention="linear"),
    "heinsen*3,softmax": dict(attention="heinsen*3,softmax"),
    "softmax, GPT-2's block": dict(attention="softmax", block="gpt2", n_layers=2),
}
# Variants of sigmoid attention; "sigmoid" above has alpha = 1.
SIGMOIDS: dict[str, dict[str, Value]] = {
    "alpha 0.5": dict(attention="sigmoid", sigmoid_alpha=0.5),
    "alpha 1.5": dict(attention="sigmoid", sigmoid_alpha=1.5),
    "alpha 0, bias -log n": dict(attention="sigmoid", sigmoid_alpha=0.0, sigmoid_bias="-log_n"),
}
CONTEST = Contest(Path(config.__file__), config.get_config, CONTESTANTS | SIGMOIDS)


def timed() -> dict[str, TrainConfig]:
    """Return the contestants whose speed is measured."""
    return {name: CONTEST.train_config(name) for name in CONTESTANTS}
