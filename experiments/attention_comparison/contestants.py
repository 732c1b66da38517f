"""The contestants, and the fields of the model in which they differ."""

import dataclasses

from experiments.attention_comparison import config
from heinsen.config import from_mapping
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Value
from heinsen.training.run import TrainConfig

RATE = "optimizer.learning_rate"


@dataclasses.dataclass(frozen=True)
class Contestant:
    """The fields of a contestant's model."""

    attention: str
    block: str = "heinsen"
    n_layers: int = 4
    sigmoid_alpha: float = 1.0
    sigmoid_bias: str = "0.0"

    @property
    def fields(self) -> dict[str, Value]:
        """The fields as a run's config names them."""
        return {f"model.{name}": value for name, value in dataclasses.asdict(self).items()}

    def settings(self, learning_rate: float) -> dict[str, Value]:
        return self.fields | {RATE: learning_rate}

    def runs_of(self, runs: list[RunView]) -> list[RunView]:
        return [run for run in runs if self.fields.items() <= run.run.point.items()]


# Two layers of GPT-2's block have as many parameters as four of the paper's.
CONTESTANTS = {
    "heinsen": Contestant("heinsen"),
    "softmax": Contestant("softmax"),
    "sigmoid": Contestant("sigmoid"),
    "linear": Contestant("linear"),
    "heinsen*3,softmax": Contestant("heinsen*3,softmax"),
    "softmax, GPT-2's block": Contestant("softmax", "gpt2", 2),
}
# Variants of sigmoid attention; "sigmoid" above has alpha = 1.
SIGMOIDS = {
    "alpha 0.5": Contestant("sigmoid", sigmoid_alpha=0.5),
    "alpha 1.5": Contestant("sigmoid", sigmoid_alpha=1.5),
    "alpha 0, bias -log n": Contestant("sigmoid", sigmoid_alpha=0.0, sigmoid_bias="-log_n"),
}


def train_config(contestant: Contestant) -> TrainConfig:
    """Return the config of a contestant's runs."""
    mapping = config.get_config()
    mapping.model.update(dataclasses.asdict(contestant))
    return from_mapping(TrainConfig, mapping.to_dict())
