"""Tokens a second of a training step for every contestant, one step of each in turn; JSON on the last line of stdout.

python experiments/attention_comparison/speed.py
"""

import json
import statistics
import time

from absl import app, logging

LENGTHS = (512, 8192)  # tokens of a sequence
TOKENS = 8192  # of a step, in sequences of one length
REPEATS = 5  # timed steps of each contestant


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from experiments.attention_comparison.contestants import CONTESTANTS
    from heinsen.parallel import keep_host_memory

    keep_host_memory()
    table = {name: {} for name in CONTESTANTS}
    for length in LENGTHS:
        steps = {name: prepare(contestant, length) for name, contestant in CONTESTANTS.items()}
        seconds = {name: [] for name in steps}
        for _ in range(REPEATS):
            for name, step in steps.items():
                step()  # what the others have left in the caches is gone
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            table[name][length] = TOKENS / statistics.median(times)
            print(f"T = {length:>6}  {name:<24} {table[name][length]:>10,.0f} tokens/s", flush=True)
    print(json.dumps(table))


def prepare(contestant, length: int):
    """A function that takes one training step and waits for it."""
    import jax
    import numpy as np

    from experiments.attention_comparison.contestants import train_config
    from heinsen.parallel import make_mesh
    from heinsen.training.optimizer import make_optimizer
    from heinsen.training.step import init_train_state, make_train_step

    config, mesh = train_config(contestant), make_mesh()
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    states = [init_train_state(config.model, optimizer, 0, mesh)]
    train_step = make_train_step(config.model, optimizer, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (1, TOKENS // length, length + 1), np.int32)

    def step():
        state, metrics = train_step(states.pop(), tokens)
        states.append(jax.block_until_ready(state))
        return metrics

    step()
    return step


if __name__ == "__main__":
    app.run(main)
