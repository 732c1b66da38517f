"""The cells: attentions with additions in GPT-2's block, of the 2M parameters of experiments/attribution."""

from experiments.attribution import config as attribution

RATE = 2e-3  # of all, untuned
N_STEPS = 3920  # of 4 windows of 1,024 bytes: twice attribution's
EVERY = 140  # steps between two looks, the last of them at the end; a multiple of lanes.CYCLES
THRESHOLD = 3.2  # nats: a model whose loss on recalled bytes falls below it has learned to copy
SEEDS = 0, 1, 2, 3

# Attribution's of the same name, but for real values.
_EXPONENTIAL = attribution.CELLS["exponential, additions, GPT-2's block"]
CELLS: dict[str, attribution.Cell] = {
    "exponential": _EXPONENTIAL,
    "linear": attribution.CELLS["linear, additions, GPT-2's block"],
    "gated softmax": attribution.CELLS["gated softmax, additions, GPT-2's block"],
    "softmax": attribution.CELLS["softmax, additions, GPT-2's block"],
    "exponential, real values": _EXPONENTIAL._replace(model={**_EXPONENTIAL.model, "value_domain": "real"}),
}
SMALL = "exponential", "softmax"
