"""Measure attention, training steps and decoding: accuracy, time, memory, bounds of the time.

    python scripts/benchmark.py accuracy [--lengths=250,1000 --dtypes=float32]
    python scripts/benchmark.py attention [--lengths=256,1024,4096,16384,65536 --inputs=normal,tails]
    python scripts/benchmark.py attention --target=h200 [--batch=32 --lengths=1024]
    python scripts/benchmark.py step [--config=configs/NAME.py --config.any.field=value ...] [--lengths=1024,8192]
    python scripts/benchmark.py attention|step --old=COMMIT [...]
    python scripts/benchmark.py decode [--config=configs/NAME.py --contexts=1000,10000,100000,1000000 --batches=1,32]
    python scripts/benchmark.py losses [--write_reference]

accuracy: errors of every implementation on this device against float64 on the host, outputs and gradients, with log and
real values, with and without a forget gate, beside the promised tolerances.

attention: forward and backward passes, against softmax attention at the same shapes: JAX's, cuDNN's on GPUs, PyTorch's
if it is installed, on GPUs also the linear attention of jax-linear-attention (heads of 64). What needs more memory than
the device has is left out from that length on. Each kind of --inputs beyond "normal" is another contestant (offsets,
spikes and heavy tails take weights block by block, log values that spread logarithms). With --target nothing runs:
kernels, bytes and a lower bound of the time on another machine, by its compiler (docs/planning.md).

step: the training step of a config on random tokens, against the rate of 4096 x 4096 x 4096 matrix products and the
device's peak rate; on GPUs beside the same model with softmax attention, which is cuDNN's there. At other --lengths a
step has as many tokens. HEINSEN_XLA_OPTIONS=0 leaves XLA's options as they are (docs/training.md).

With --old, attention and step compare this checkout with another commit, whose package is imported under another name:
attention's chunked form in more cases, also packed documents and all keys; the step of a config that both can read.

decode: time per token and memory by the context length, for the model of a config and for the same model with softmax
attention and its key-value cache. Parameters are random and states are synthetic, as if so many tokens had been read.
The time to read the parameters once is shown for comparison. Caches that do not fit into memory are left out.

losses: 200 training steps of configs/demo.py on a generated text, beside a CPU's committed losses of the same steps.
--write_reference makes these anew, on a CPU.

All contestants run in one process and in turn, with warm-up calls before each timed one; medians are compared. Each
benchmark prints a report and writes all figures to results.json; `decode` also a plot.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_counts, parse_flags, read_config, refuse

OUT = flags.DEFINE_string("out", None, "Folder for results.json; default: runs/benchmarks/attention, .../step.")
CONFIG = flags.DEFINE_string(
    "config", "configs/pile_125m.py", "step, decode: config file; --config.a.b=value overrides a field."
)
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed calls of each contestant.", lower_bound=1)
LENGTHS = flags.DEFINE_list(
    "lengths",
    [],
    "accuracy, attention, step: numbers of tokens T; default: 250,1000, 256,1024,4096,16384,65536, and the config's.",
)
ONLY = flags.DEFINE_list("only", [], "Names of the implementations, contestants or kinds of attention; default: all.")
SKIP = flags.DEFINE_list("skip", [], "attention: names of contestants to leave out.")
DTYPES = flags.DEFINE_list(
    "dtypes", [], "accuracy: default: float32,bfloat16; attention: float32; times on accelerators also bfloat16."
)
BATCH = flags.DEFINE_integer("batch", 1, "attention: batch size B.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", None, "Heads H; default: 2 for accuracy, 24 for attention.", lower_bound=1)
FEATURES = flags.DEFINE_integer(
    "features", 32, "accuracy, attention: features of keys and values, K = V.", lower_bound=1
)
TIME_LIMIT = flags.DEFINE_float(
    "time_limit", 5.0, "attention: seconds; a slower contestant is timed once, and left out at longer sequences."
)
INPUTS = flags.DEFINE_list("inputs", ["normal"], "attention: kinds of inputs: normal, offsets, spikes, tails, values.")
OLD = flags.DEFINE_string("old", None, "attention, step: a commit to compare with.")
TARGET = flags.DEFINE_string("target", None, "attention: bounds for this machine, such as h200, v5e-4, v5p-8.")
CONTEXTS = flags.DEFINE_list("contexts", ["1000", "10000", "100000", "1000000"], "decode: tokens read before.")
BATCHES = flags.DEFINE_list("batches", ["1", "32"], "decode: texts at a time; only the fewest with all contexts.")
WRITE_REFERENCE = flags.DEFINE_bool("write_reference", False, "losses: write the CPU's losses, instead of comparing.")


def accuracy(out: Path) -> str:
    from scripts.benchmarking.accuracy import benchmark_accuracy

    lengths = sorted(parse_counts("lengths", LENGTHS.value or ["250", "1000"]))
    return benchmark_accuracy(lengths, DTYPES.value, ONLY.value, HEADS.value or 2, FEATURES.value, out)


def attention(out: Path) -> str:
    from scripts.benchmarking.attention import Settings, benchmark_attention
    from scripts.benchmarking.bounds import find_bounds

    settings = Settings(
        lengths=sorted(parse_counts("lengths", LENGTHS.value or ["256", "1024", "4096", "16384", "65536"])),
        dtypes=DTYPES.value,
        inputs=INPUTS.value,
        only=ONLY.value,
        skip=SKIP.value,
        batch=BATCH.value,
        heads=HEADS.value or 24,
        features=FEATURES.value,
        repeats=REPEATS.value,
        time_limit=TIME_LIMIT.value,
        old=OLD.value,
    )
    if TARGET.value is not None:
        return find_bounds(settings, TARGET.value, out)
    return benchmark_attention(settings, out)


def step(out: Path) -> str:
    from scripts.benchmarking.step import benchmark_step

    lengths = sorted(parse_counts("lengths", LENGTHS.value))
    return benchmark_step(read_config(CONFIG), lengths, ONLY.value, OLD.value, REPEATS.value, out)


def decode(out: Path) -> str:
    from scripts.benchmarking.decode import Settings, benchmark_decode

    contexts = sorted(parse_counts("contexts", CONTEXTS.value))
    batches = sorted(parse_counts("batches", BATCHES.value))
    return benchmark_decode(read_config(CONFIG), Settings(contexts, batches, REPEATS.value), out)


def losses(out: Path) -> str:
    from scripts.benchmarking.losses import compare_losses, write_reference

    return write_reference(out) if WRITE_REFERENCE.value else compare_losses(out)


BENCHMARKS: dict[str, Callable[[Path], str]] = {
    "accuracy": accuracy,
    "attention": attention,
    "step": step,
    "decode": decode,
    "losses": losses,
}


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        refuse(f"expected one of {', '.join(BENCHMARKS)}, got {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    out = Path(OUT.value or f"runs/benchmarks/{argv[1]}")
    with exit_on_error(on_interrupt="interrupted"):
        print(BENCHMARKS[argv[1]](out))
        print(f"written: {out}")


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, takes_arguments=True))
