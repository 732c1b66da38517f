"""The teachers and the cells: which attention replaces softmax, and how many tokens it takes.

Written down before the first student: a cell is judged by the right answers that it keeps of its teacher's (recall of 8
to 48 pairs, copying of 8 to 64 tokens) and by its loss of text in bits per byte. Exponential features are worth it if,
with the gate and a tenth of the teacher's tokens, they keep at least 90% of its recall, 50 points more than elu + 1 at
its best, and text within 0.4 bits per byte of the teacher's, within 0.2 at a quarter of the tokens.

Changed after five cells, now those with "rotary" in their name: students leave rotations out, and both grids of rates
moved up, as most cells had extended them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import default

SEEDS = 0, 1, 2, 3  # the first one tunes
TEACHER_SEED = 4
VALIDATION_SEED = 5  # of the tasks
TEACHER_STEPS = 1600
LENGTH = 256  # tokens of a window
TEXT_ROWS, TASK_ROWS = 8, 4  # windows of a batch: of text, of each task
PAIRS = 8, 16, 32, 48
COPIES = 8, 16, 32, 64
TEACHER_RATES = 2e-3, 4e-3, 8e-3, 1.6e-2  # of Muon
ATTENTION_RATES = 1e-2, 3e-2, 1e-1, 3e-1  # of AdamW, in the first stage
TEXT_RATES = 2e-3, 4e-3, 8e-3, 1.6e-2  # of AdamW, in the second


def get_config() -> ConfigDict:
    """The config of the main teacher."""
    config = default.get_config()
    config.update(batch_size=TEXT_ROWS + 2 * TASK_ROWS, sequence_length=LENGTH)
    config.total_tokens = TEACHER_STEPS * config.batch_size * LENGTH
    config.model.update(vocab_size=257, padded_vocab_size=264, n_layers=2, d_model=128, n_heads=4, d_key=32, d_value=32)
    config.model.update(attention="softmax", block="gpt2", position="rotary")
    config.optimizer.update(name="muon", final_learning_rate=3e-5, warmup_steps=20)
    return config


ADDITIONS = dict(output_gate=True, convolution=4)
# Fields of the model.
TEACHERS: dict[str, dict[str, Any]] = {
    "softmax, additions": ADDITIONS,
    "softmax": {},
    "gated softmax, additions": ADDITIONS | dict(forget_gate="head"),
}
MAIN = "softmax, additions"


class Cell(NamedTuple):
    """Fields of the model that replace its teacher's, and the tokens.

    share: of the teacher's tokens. stages: 2: a conversion; 1: all weights learn, the teacher's or (scratch) new ones.
    """

    model: Mapping[str, Any]
    share: float = 0.1
    teacher: str = MAIN
    stages: int = 2
    scratch: bool = False
    window_starts: int = 16


def _features(name: str, **fields: Any) -> dict[str, Any]:
    own = dict(attention="heinsen", value_domain="real", feature_map=name, forget_gate="head", position="none")
    return own | fields


EXPONENTIAL, ELU, RELU, HEDGEHOG = (_features(name) for name in ("exponential", "elu", "relu", "softmax"))
ROTARY = dict(position="rotary")  # the maps read rotated queries and keys, as the teacher's softmax does
# The most important ones first.
CELLS: dict[str, Cell] = {
    "exponential": Cell(EXPONENTIAL),
    "elu + 1": Cell(ELU),
    "softmax over features": Cell(HEDGEHOG),
    "relu": Cell(RELU),
    "exponential, 25%": Cell(EXPONENTIAL, 0.25),
    "elu + 1, 25%": Cell(ELU, 0.25),
    "exponential, no gate": Cell(_features("exponential", forget_gate="none")),
    "elu + 1, no gate": Cell(_features("elu", forget_gate="none")),
    "softmax, finetuned": Cell({}, stages=1),
    "exponential, from scratch": Cell(EXPONENTIAL, stages=1, scratch=True),
    "exponential, 50%": Cell(EXPONENTIAL, 0.5),
    "elu + 1, 50%": Cell(ELU, 0.5),
    "exponential, 5%": Cell(EXPONENTIAL, 0.05),
    "elu + 1, 5%": Cell(ELU, 0.05),
    "exponential, of softmax": Cell(EXPONENTIAL, teacher="softmax"),
    "elu + 1, of softmax": Cell(ELU, teacher="softmax"),
    "exponential, of gated softmax": Cell(EXPONENTIAL, teacher="gated softmax, additions"),
    "elu + 1, of gated softmax": Cell(ELU, teacher="gated softmax, additions"),
    "exponential, 32 features": Cell(_features("exponential", d_features=32)),
    "elu + 1, 32 features": Cell(_features("elu", d_features=32)),
    "exponential, rotary": Cell(EXPONENTIAL | ROTARY),
    "elu + 1, rotary": Cell(ELU | ROTARY),
    "softmax over features, rotary": Cell(HEDGEHOG | ROTARY),
    "relu, rotary": Cell(RELU | ROTARY),
    "exponential, rotary, windows at 0": Cell(EXPONENTIAL | ROTARY, window_starts=0),
    "exponential, rotary, 25%": Cell(EXPONENTIAL | ROTARY, 0.25),
    "exponential, from scratch, 100%": Cell(EXPONENTIAL, 1.0, stages=1, scratch=True),
}
SMALL = ("exponential",)
