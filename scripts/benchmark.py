"""Measure attention, training steps, decoding, sampling and reading: accuracy, time, memory, bounds of the time.

    python scripts/benchmark.py accuracy [--lengths=250,1000 --sigmas=1,8,64]
    python scripts/benchmark.py attention [--lengths=256,1024,4096,16384,65536]
    python scripts/benchmark.py step [--config=configs/NAME.py --config.any.field=value ...]
    python scripts/benchmark.py decode [--config=configs/NAME.py --contexts=1000,10000,100000,1000000 --batches=1,32]
    python scripts/benchmark.py losses [--write_reference]
    python scripts/benchmark.py sampling [--batches=1,32]
    python scripts/benchmark.py bounds --target=h200 [--shape=32,24,1024,32 --only=chunked]
    python scripts/benchmark.py data [--config=configs/NAME.py --config.data.path=DATASET]

accuracy: errors of every implementation in float32 on this device against float64 on the host, outputs and gradients,
with log and real values, with and without a forget gate, beside the promised tolerances.

attention: forward and backward passes, against softmax attention at the same shapes. PyTorch's
scaled_dot_product_attention and, on a GPU, flash-linear-attention take part if they are installed. Contestants that
would take longer than --time_limit, or more memory than the device has, are left out from that length on.

step: the training step of a config on random tokens, against the rate of a 4096 x 4096 x 4096 matrix product and the
device's peak rate.

decode: time per token and memory by the context length, for the model of a config and for the same model with softmax
attention and its key-value cache. Parameters are random and states are synthetic, as if so many tokens had been read.
The time to read the parameters once is shown for comparison. Caches that do not fit into memory are left out.

losses: 200 training steps of configs/demo.py on a generated text, beside a CPU's committed losses of the same steps.
--write_reference makes these anew, on a CPU.

sampling: time to draw a token from the logits of the config's vocabulary, and by top-p with a sort instead.

bounds: kernels, bytes and a lower bound of the time of attention on a machine that is not there, by its compiler
(docs/performance.md), for forward and backward pass together and each implementation. Nothing runs.

data: the rate of reading a config's training batches, with and without the check that all ids are in the vocabulary.

All contestants run in one process and in turn, with warm-up calls before each timed one; medians are compared. Each
benchmark prints a table and writes results.json; `attention` and `decode` also a plot.
"""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, read_config, refuse

OUT = flags.DEFINE_string(
    "out", None, "Folder for results.json and plots; default: runs/benchmarks/attention, .../step."
)
CONFIG = flags.DEFINE_string(
    "config", "configs/default.py", "step, decode, sampling, data: config file; --config.a.b=value overrides a field."
)
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed calls of each contestant.", lower_bound=1)
LENGTHS = flags.DEFINE_list(
    "lengths",
    [],
    "accuracy, attention: numbers of tokens T; default: 250,1000 and 256,1024,4096,16384,65536.",
)
SIGMAS = flags.DEFINE_list("sigmas", ["1", "8", "64"], "accuracy: standard deviations of the inputs, up to 64.")
ONLY = flags.DEFINE_list(
    "only", [], "attention: names of the contestants to run, bounds: of the implementations; default: all available."
)
SKIP = flags.DEFINE_list("skip", [], "attention: names of contestants to leave out.")
DTYPES = flags.DEFINE_list("dtypes", [], "attention, bounds: default: float32; on accelerators also bfloat16.")
BATCH = flags.DEFINE_integer("batch", 1, "attention: batch size B.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", None, "Heads H; default: 2 for accuracy, 24 for attention.", lower_bound=1)
FEATURES = flags.DEFINE_integer(
    "features", 32, "accuracy, attention: features of keys and values, K = V.", lower_bound=1
)
STOP_AFTER = flags.DEFINE_float(
    "stop_after", math.inf, "accuracy, attention: seconds after which nothing more is begun.", lower_bound=0.0
)
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "attention: seconds that a call may take.", lower_bound=0.0)
TARGET = flags.DEFINE_string("target", None, "bounds: the machine, such as h100, h200, v5e-4, v5p-8.")
SHAPE = flags.DEFINE_list("shape", ["32", "24", "1024", "32"], "bounds: batch B, heads H, tokens T, features K = V.")
CONTEXTS = flags.DEFINE_list("contexts", ["1000", "10000", "100000", "1000000"], "decode: tokens read before.")
BATCHES = flags.DEFINE_list(
    "batches", ["1", "32"], "decode, sampling: texts at a time; `decode` takes only the first with all contexts."
)
WRITE_REFERENCE = flags.DEFINE_bool("write_reference", False, "losses: write the CPU's losses, instead of comparing.")
CALL_TOKENS = flags.DEFINE_integer("call_tokens", 32, "decode: tokens drawn per call.", lower_bound=1)


def accuracy(out: Path) -> str:
    from scripts.benchmarking.accuracy import Settings, benchmark_accuracy
    from scripts.benchmarking.measure import parse_numbers

    settings = Settings(
        lengths=sorted(parse_numbers("lengths", LENGTHS.value or ["250", "1000"])),
        sigmas=sorted(parse_numbers("sigmas", SIGMAS.value, at_most=64)),
        heads=HEADS.value or 2,
        features=FEATURES.value,
        stop_after=STOP_AFTER.value,
    )
    return benchmark_accuracy(settings, out)


def attention(out: Path) -> str:
    from scripts.benchmarking.attention import Settings, benchmark_attention
    from scripts.benchmarking.measure import parse_numbers

    settings = Settings(
        lengths=sorted(parse_numbers("lengths", LENGTHS.value or ["256", "1024", "4096", "16384", "65536"])),
        dtypes=DTYPES.value,
        only=ONLY.value,
        skip=SKIP.value,
        batch=BATCH.value,
        heads=HEADS.value or 24,
        features=FEATURES.value,
        repeats=REPEATS.value,
        time_limit=TIME_LIMIT.value,
        stop_after=STOP_AFTER.value,
    )
    return benchmark_attention(settings, out)


def step(out: Path) -> str:
    from scripts.benchmarking.step import benchmark_step

    return benchmark_step(read_config(CONFIG), REPEATS.value, out)


def decode(out: Path) -> str:
    from scripts.benchmarking.decode import Settings, benchmark_decode
    from scripts.benchmarking.measure import parse_numbers

    contexts, batches = parse_numbers("contexts", CONTEXTS.value), parse_numbers("batches", BATCHES.value)
    settings = Settings(sorted(contexts), batches, CALL_TOKENS.value, REPEATS.value)
    return benchmark_decode(read_config(CONFIG), settings, out)


def losses(out: Path) -> str:
    from scripts.benchmarking.losses import compare_losses, write_reference

    return write_reference(out) if WRITE_REFERENCE.value else compare_losses(out)


def sampling(out: Path) -> str:
    from scripts.benchmarking.measure import parse_numbers
    from scripts.benchmarking.sampling import benchmark_sampling

    vocab_size = read_config(CONFIG)["model"]["vocab_size"]
    return benchmark_sampling(vocab_size, parse_numbers("batches", BATCHES.value), REPEATS.value, out)


def bounds(out: Path) -> str:
    from scripts.benchmarking.bounds import Settings, find_bounds
    from scripts.benchmarking.measure import parse_numbers

    shape = parse_numbers("shape", SHAPE.value)
    return find_bounds(Settings(TARGET.value, shape, DTYPES.value or ["float32"], ONLY.value), out)


def data(out: Path) -> str:
    from scripts.benchmarking.data import benchmark_data

    return benchmark_data(read_config(CONFIG), REPEATS.value, out)


BENCHMARKS: dict[str, Callable[[Path], str]] = {
    "accuracy": accuracy,
    "attention": attention,
    "step": step,
    "decode": decode,
    "losses": losses,
    "sampling": sampling,
    "bounds": bounds,
    "data": data,
}


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        refuse(f"expected one of {', '.join(BENCHMARKS)}, got {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    out = Path(OUT.value or f"runs/benchmarks/{argv[1]}")
    results = out / "results.json"
    before = results.stat().st_mtime_ns if results.exists() else None
    with exit_on_error():
        try:
            print(BENCHMARKS[argv[1]](out))
        except KeyboardInterrupt:
            is_new = results.exists() and results.stat().st_mtime_ns != before
            sys.exit(f"interrupted; {f'{results} has what was measured' if is_new else 'nothing was written'}")


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, takes_arguments=True))
