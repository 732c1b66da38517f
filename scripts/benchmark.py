"""Time and memory of the attention, of a whole training step, and of decoding.

    python scripts/benchmark.py attention [--lengths=256,1024,4096,16384,65536]
    python scripts/benchmark.py step [--config=configs/NAME.py --config.any.field=value ...]
    python scripts/benchmark.py decode [--config=configs/NAME.py --contexts=1000,10000,100000,1000000 --batches=1,32]

attention: forward and backward, against softmax attention at the same shapes. PyTorch's scaled_dot_product_attention
and, on a GPU, flash-linear-attention take part if they are installed. Those that would take longer than --time_limit or
more memory than the device has are left out from that length on. Writes the results as JSON and a plot.

step: the training step of a config on random tokens, against the rate of a 4096 x 4096 x 4096 matmul.

decode: time per token and memory against the context before it, for a config's model and for the same model with
softmax attention and its key-value cache, both with random parameters and states made up as if so many tokens had been
read; against the time to read the parameters once. Caches that do not fit into memory are left out.

All contestants run in one process, in turn: calls to warm up, then a timed one; medians are compared.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import config_flags

OUT = flags.DEFINE_string("out", None, "Folder for results.json and plots; none: benchmarks/attention or .../step.")
CONFIG = config_flags.DEFINE_config_file("config", "configs/default.py", "step: config file; --config.a.b=value.")
CONTEXTS = flags.DEFINE_list("contexts", ["1000", "10000", "100000", "1000000"], "decode: tokens before.")
BATCHES = flags.DEFINE_list("batches", ["1", "32"], "decode: texts at a time; all contexts with the first.")
CALL_TOKENS = flags.DEFINE_integer("call_tokens", 32, "decode: tokens drawn a call.", lower_bound=1)
LENGTHS = flags.DEFINE_list("lengths", ["256", "1024", "4096", "16384", "65536"], "Numbers of tokens T.")
ONLY = flags.DEFINE_list("only", [], "Names of the contestants to run; none: all there are.")
DTYPES = flags.DEFINE_list("dtypes", [], "float32, bfloat16; none: float32, and bfloat16 too on accelerators.")
BATCH = flags.DEFINE_integer("batch", 1, "B.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 24, "H.", lower_bound=1)
FEATURES = flags.DEFINE_integer("features", 32, "K = V, features of keys and of values.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed calls of each.", lower_bound=1)
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds a call may take.", lower_bound=0.0)

WARM_UP = 0.3  # seconds
DIRECTIONS = ("forward", "forward+backward")


@dataclasses.dataclass
class Prepared:
    """One contestant at one length: a call that waits for its result, and its peak memory beyond the inputs."""

    call: Callable[[], Any]
    peak_bytes: int | None


class Skipped(Exception):
    """Why a contestant does not take part at a length."""


@dataclasses.dataclass(frozen=True)
class Shape:
    n_tokens: int
    dtype: str

    @property
    def axes(self) -> tuple[int, int, int, int]:
        return BATCH.value, HEADS.value, self.n_tokens, FEATURES.value


def device_memory() -> int | None:
    """Bytes that may still be allocated, as far as the backend tells."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if jax.default_backend() == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def device_name() -> str:
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def versions() -> dict[str, str]:
    found = {}
    for package in ("jax", "jaxlib", "torch", "flash-linear-attention"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---- contestants ---------------------------------------------------------------------------------


def prepare_jax(function, shape: Shape, direction: str) -> Prepared:
    import jax

    arrays = [jax.random.normal(key, shape.axes, shape.dtype) for key in jax.random.split(jax.random.key(0), 4)]
    if direction == "forward":
        run, arguments = function, arrays[:3]
    else:
        # y comes back too, as in training, where the layers above need it.
        def run(q, k, v, g):
            y, pull = jax.vjp(function, q, k, v)
            return y, pull(g.astype(y.dtype))

        arguments = arrays
    compiled = jax.jit(run).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    peak = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
    free = device_memory()
    if peak is not None and free is not None and peak > 0.9 * free:
        raise Skipped(f"needs {peak / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), peak)


def heinsen_form(function: str, implementation: str):
    import heinsen

    return functools.partial(getattr(heinsen, function), implementation=implementation)


def unchecked_form(q, k, v):
    """The chunked form as if no term were ever lost: what exactness costs is what it gains."""
    from unittest import mock

    import jax.numpy as jnp

    chunked = importlib.import_module("heinsen.ops.chunk")
    with mock.patch.object(chunked, "_lost", lambda *_: jnp.bool_(False)):
        return heinsen_form("log_attention", "chunked")(q, k, v)


def jax_softmax(dtype: str):
    import jax

    fused = jax.default_backend() == "gpu" and dtype == "bfloat16"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if fused else "xla")
    tokens_first = lambda x: x.swapaxes(1, 2)
    return lambda q, k, v: tokens_first(attend(*map(tokens_first, (q, k, v))))


def torch_inputs(shape: Shape):
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    return [
        torch.randn(shape.axes, generator=generator, device=device, dtype=dtype, requires_grad=i < 3) for i in range(4)
    ]


def prepare_torch(function, shape: Shape, direction: str) -> Prepared:
    import torch

    *inputs, g = torch_inputs(shape)
    on_gpu = g.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def call():
        if direction == "forward":
            with torch.no_grad():
                function(*inputs)
        else:
            torch.autograd.grad(function(*inputs), inputs, g)
        if on_gpu:
            torch.cuda.synchronize()

    if on_gpu:
        before = torch.cuda.memory_allocated()
        call()
        return Prepared(call, torch.cuda.max_memory_allocated() - before)
    return Prepared(call, resident_growth(call))


def resident_growth(call) -> int | None:
    """How much a call raises the process's peak of resident memory; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
        read = lambda field: next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field + ":")
        )
        before = read("VmRSS")
        call()
        return max(0, read("VmHWM") - before)
    except OSError:
        return None


def torch_softmax(q, k, v):
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def torch_linear(q, k, v):
    from fla.ops.linear_attn import chunk_linear_attn

    y = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)
    return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)


def contestants() -> dict[str, Callable[[Shape, str], Prepared]]:
    """{name: how to prepare it for a shape and direction}, of those that can run here."""
    import jax

    forms = {
        "heinsen chunked": ("log_attention", "chunked"),
        "heinsen chunked (real values)": ("attention", "chunked"),
        "heinsen scan": ("log_attention", "scan"),
        "heinsen reference": ("log_attention", "reference"),
    }
    found: dict[str, Callable[[Shape, str], Prepared]] = {
        name: functools.partial(prepare_jax, heinsen_form(*form)) for name, form in forms.items()
    }
    found["heinsen chunked (unchecked)"] = functools.partial(prepare_jax, unchecked_form)
    found["softmax (jax)"] = lambda shape, direction: prepare_jax(jax_softmax(shape.dtype), shape, direction)
    try:
        import torch
    except ImportError:
        return found
    # On a GPU machine a CPU build of torch would be another race.
    if torch.cuda.is_available() == (jax.default_backend() == "gpu"):
        found["softmax (torch)"] = functools.partial(prepare_torch, torch_softmax)
        if torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
            found["linear (flash-linear-attention)"] = functools.partial(prepare_torch, torch_linear)
    return found


# ---- the race ------------------------------------------------------------------------------------


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def warm_up(call) -> None:
    """Calls for WARM_UP seconds: caches hold other data, and threads that have slept wake slowly on some machines."""
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP:
        call()


def race(entries: dict, shape: Shape, direction: str, out_of_race: dict) -> list[dict]:
    """One result per contestant that takes part; those that cannot go on are added to `out_of_race`."""
    prepared, times = {}, {}
    for name, prepare in entries.items():
        if (name, direction, shape.dtype) in out_of_race:
            continue
        try:
            entry = prepare(shape, direction)
            seconds(entry.call)
            took = seconds(entry.call)
        except Skipped as reason:
            out_of_race[name, direction, shape.dtype] = str(reason)
        except Exception as error:  # out of memory, or a kernel that does not take this shape: one less in the race
            out_of_race[name, direction, shape.dtype] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            prepared[name], times[name] = entry, [took]
            if took > TIME_LIMIT.value:
                out_of_race[name, direction, shape.dtype] = f"took {took:.1f} s at T = {shape.n_tokens}"
    for _ in range(REPEATS.value - 1):
        for name, entry in prepared.items():
            if statistics.median(times[name]) * len(times[name]) < 3 * TIME_LIMIT.value:
                warm_up(entry.call)
                times[name].append(seconds(entry.call))
    return [
        dict(
            name=name,
            direction=direction,
            dtype=shape.dtype,
            tokens=shape.n_tokens,
            milliseconds=1e3 * statistics.median(times[name]),
            fastest_milliseconds=1e3 * min(times[name]),
            calls=len(times[name]),
            peak_bytes=entry.peak_bytes,
        )
        for name, entry in prepared.items()
    ]


def leave_out_the_hopeless(results: list[dict], n_tokens: int, out_of_race: dict) -> None:
    """Whoever would exceed the time limit if its time went on growing as it did last."""
    for result in results:
        growth = 1.0
        for earlier in results:
            same = all(result[field] == earlier[field] for field in ("name", "direction", "dtype"))
            if same and earlier["tokens"] * 4 == result["tokens"]:
                growth = result["milliseconds"] / earlier["milliseconds"] / 4
        ratio = n_tokens / result["tokens"]
        expected = 1e-3 * result["milliseconds"] * ratio * (ratio if growth > 2 else 1)
        if ratio > 1 and expected > TIME_LIMIT.value:
            key = result["name"], result["direction"], result["dtype"]
            out_of_race.setdefault(key, f"would take {expected:.0f} s at T = {n_tokens}")


def table(results: list[dict], field: str, scale: float, lengths: list[int], direction: str, dtype: str) -> list[str]:
    chosen = [r for r in results if r["direction"] == direction and r["dtype"] == dtype and r[field] is not None]
    names = list(dict.fromkeys(r["name"] for r in chosen))
    width = max([len(name) for name in names], default=0)
    lines = [" " * width + "".join(f"{f'T={n}':>12}" for n in lengths)]
    for name in names:
        cells = {r["tokens"]: f"{r[field] * scale:.4g}" for r in chosen if r["name"] == name}
        lines.append(name.ljust(width) + "".join(f"{cells.get(n, '-'):>12}" for n in lengths))
    return lines


def comparisons(results: list[dict], lengths: list[int]) -> list[str]:
    """What the chunked form gains over every other at the same length."""
    of = {(r["name"], r["direction"], r["dtype"], r["tokens"]): r["milliseconds"] for r in results}
    lines = []
    for name, direction, dtype, n_tokens in of:
        own = of.get(("heinsen chunked", direction, dtype, n_tokens))
        if own is not None and not name.startswith("heinsen chunked"):
            ratio = of[name, direction, dtype, n_tokens] / own
            lines.append(f"{direction}, {dtype}, T = {n_tokens}: {ratio:.2f} times as fast as {name}")
    return lines


def growth(entry, lengths: list[int], dtype: str, direction: str) -> dict[int, float]:
    """Time per token at each length as a multiple of that at the first, all in turn: the machine's pace changes."""
    calls = {n: entry(Shape(n, dtype), direction).call for n in lengths}
    times = {n: [] for n in lengths}
    for _ in range(REPEATS.value):
        for n, call in calls.items():
            warm_up(call)
            times[n].append(seconds(call) / n)
    return {n: statistics.median(times[n]) / statistics.median(times[lengths[0]]) for n in lengths}


def plot(results: list[dict], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(r["dtype"] for r in results))
    figure, rows = plt.subplots(len(dtypes), 3, figsize=(15, 4.6 * len(dtypes)), squeeze=False)
    names = list(dict.fromkeys(r["name"] for r in results))
    colors = dict(zip(names, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for dtype, axes in zip(dtypes, rows, strict=True):
        panels = [
            ("forward", "milliseconds", 1.0, "ms, forward"),
            ("forward+backward", "milliseconds", 1.0, "ms, forward + backward"),
            ("forward+backward", "peak_bytes", 2.0**-20, "MiB beyond inputs, forward + backward"),
        ]
        for axis, (direction, field, scale, label) in zip(axes, panels, strict=True):
            for name in names:
                points = [
                    (r["tokens"], r[field] * scale)
                    for r in results
                    if (r["name"], r["direction"], r["dtype"]) == (name, direction, dtype) and r[field]
                ]
                if points:
                    axis.loglog(*zip(*points, strict=True), "o-", base=2, label=name, color=colors[name])
            axis.set(xlabel="tokens T", ylabel=label, title=dtype)
            axis.grid(alpha=0.3)
    rows[0][0].legend(fontsize=8)
    figure.suptitle(f"causal attention, B={BATCH.value} H={HEADS.value} K=V={FEATURES.value}: {device}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def benchmark_attention(out: Path) -> None:
    import jax

    from heinsen.parallel import keep_host_memory

    keep_host_memory()
    lengths = sorted(positive_int(text, "lengths") for text in LENGTHS.value)
    dtypes = DTYPES.value or ["float32"] + ([] if jax.default_backend() == "cpu" else ["bfloat16"])
    for dtype in dtypes:
        if dtype not in ("float32", "bfloat16"):
            raise app.UsageError(f"--dtypes={dtype}: choose float32 or bfloat16")
    entries = contestants()
    unknown = set(ONLY.value) - entries.keys()
    if unknown:
        raise app.UsageError(f"--only={','.join(sorted(unknown))}: here there are {', '.join(entries)}")
    entries = {name: entry for name, entry in entries.items() if not ONLY.value or name in ONLY.value}
    device = device_name()
    out.mkdir(parents=True, exist_ok=True)

    results: list[dict] = []
    out_of_race: dict[tuple[str, str, str], str] = {}
    start = time.monotonic()
    for dtype in dtypes:
        for n_tokens in lengths:
            leave_out_the_hopeless(results, n_tokens, out_of_race)
            for direction in DIRECTIONS:
                results += race(entries, Shape(n_tokens, dtype), direction, out_of_race)
                elapsed = time.monotonic() - start
                print(f"{dtype} T={n_tokens} {direction}: done after {elapsed:.0f} s", file=sys.stderr, flush=True)

    shape = f"causal, B={BATCH.value} H={HEADS.value} K=V={FEATURES.value}"
    print(f"{shape}; {device}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    for dtype in dtypes:
        for direction in DIRECTIONS:
            for field, scale, unit in (("milliseconds", 1.0, "ms"), ("peak_bytes", 2.0**-20, "MiB beyond the inputs")):
                print(f"\n{direction}, {dtype}, {unit}")
                print("\n".join(table(results, field, scale, lengths, direction, dtype)))
    print()
    for line in comparisons(results, lengths):
        print(line)
    grown = []
    for dtype in dtypes:
        for direction in DIRECTIONS:
            of = dict(name="heinsen chunked", direction=direction, dtype=dtype)
            long = [r["tokens"] for r in results if of.items() <= r.items() and r["tokens"] >= 1024]
            for n, ratio in growth(entries[of["name"]], long, dtype, direction).items() if len(long) > 1 else ():
                grown.append(dict(**of, tokens=n, since=long[0], ratio=ratio))
                print(f"{direction}, {dtype}: time per token at T = {n} {ratio:.3f} times that at T = {long[0]}")
    for (name, direction, dtype), reason in out_of_race.items():
        print(f"left out: {name}, {direction}, {dtype}: {reason}")
    summary = dict(
        device=device,
        versions=versions(),
        batch=BATCH.value,
        heads=HEADS.value,
        features=FEATURES.value,
        results=results,
        growth=grown,
        left_out=[
            dict(zip(("name", "direction", "dtype"), key, strict=True), why=out_of_race[key]) for key in out_of_race
        ],
    )
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(results, device, out / "attention.png")
    print(f"written: {out / 'results.json'}, {out / 'attention.png'}")


def positive_int(text: str, flag: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise app.UsageError(f"--{flag}: {text!r} is not a number above 0; expected e.g. --{flag}=16,1024")
    return number


# ---- a training step -----------------------------------------------------------------------------


def benchmark_step(out: Path) -> None:
    import jax

    from heinsen.config import ConfigError, from_mapping
    from heinsen.models import count_params
    from heinsen.parallel import keep_host_memory, make_mesh
    from heinsen.training.metrics import bytes_of, train_flops_per_token
    from heinsen.training.optimizer import make_optimizer
    from heinsen.training.run import TrainConfig
    from heinsen.training.step import init_train_state, make_train_step

    try:
        config = from_mapping(TrainConfig, CONFIG.value.to_dict())
    except ConfigError as error:
        raise app.UsageError(str(error)) from error
    keep_host_memory()
    mesh, optimizer = make_mesh(), make_optimizer(config.optimizer, config.total_steps)
    state = init_train_state(config.model, optimizer, config.seed, mesh)
    shape = config.accumulation_steps, config.sequences_per_pass, config.sequence_length + 1
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
    step = make_train_step(config.model, optimizer, mesh).lower(state, tokens).compile()
    size, dtype = 4096, "float32" if jax.default_backend() == "cpu" else config.model.dtype
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda x: x @ x).lower(matrix).compile()

    def take_step():
        nonlocal state
        state, _ = step(state, tokens)
        jax.block_until_ready(state)

    multiply = lambda: product(matrix).block_until_ready()
    step_seconds, product_seconds = [], []
    for _ in range(REPEATS.value):
        for call, times in ((take_step, step_seconds), (multiply, product_seconds)):
            call()
            times.append(seconds(call))
        print(f"step {step_seconds[-1]:.3f} s, product {product_seconds[-1]:.3f} s", file=sys.stderr, flush=True)

    n_params, n_tokens = count_params(state.params), config.batch_size * config.sequence_length
    per_step = statistics.median(step_seconds)
    rate = n_tokens * train_flops_per_token(n_params) / per_step
    product_rate = 2 * size**3 / statistics.median(product_seconds) * jax.device_count()
    summary = dict(
        device=f"{jax.device_count()} x {device_name()}" if jax.device_count() > 1 else device_name(),
        versions=versions(),
        parameters=n_params,
        tokens_per_step=n_tokens,
        seconds_per_step=per_step,
        fastest_seconds_per_step=min(step_seconds),
        steps=len(step_seconds),
        tokens_per_second=n_tokens / per_step,
        flops_per_second=rate,  # 6 times the parameters a token
        product_flops_per_second=product_rate,
        product_dtype=dtype,
        share_of_product_rate=rate / product_rate,
        peak_bytes=bytes_of(step),
        config=CONFIG.value.to_dict(),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['device']}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    print(f"{n_params:,} parameters, {config.batch_size} x {config.sequence_length} tokens a step")
    print(f"{per_step:.4g} s a step (fastest {min(step_seconds):.4g}), {n_tokens / per_step:,.0f} tokens/s")
    print(
        f"{rate / 1e9:,.0f} GFLOP/s by 6 N T: {rate / product_rate:.1%} of the {product_rate / 1e9:,.0f} that a "
        f"{dtype} product of {size} x {size} matrices reaches"
    )
    print(f"{summary['peak_bytes'] / 2**30:.2f} GiB a device by XLA's analysis")
    print(f"written: {out / 'results.json'}")


# ---- decoding ------------------------------------------------------------------------------------


def made_up_prefix(model, batch: int, context: int, room: int):
    """A prefix as if `context` tokens had been read: running sums of their size, filled caches with room for more."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from heinsen.decoding import Prefix
    from heinsen.models import init_model_state
    from heinsen.ops.states import LogState

    rng = np.random.default_rng(0)
    draw = lambda x, size=0.0: jnp.asarray(size + rng.standard_normal(x.shape, np.float32), x.dtype)
    shapes = jax.eval_shape(lambda: init_model_state(model, batch, context + room))
    # Caches are filled with one number: drawing them would take longer than all the rest.
    fill = lambda s: (
        LogState(*(draw(x, np.log(context)) for x in s))
        if isinstance(s, LogState)
        else jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), s)
    )
    state = shapes._replace(
        position=draw(shapes.position),
        attention=tuple(map(fill, shapes.attention)),
        n_tokens=jnp.full(batch, context, jnp.int32),
        document_start=jnp.zeros(batch, jnp.int32),
    )
    return Prefix(jnp.zeros((batch, model.padded_vocab_size), state.position.dtype), state)


def benchmark_decode(out: Path) -> None:
    import jax
    import jax.numpy as jnp

    from heinsen.config import ConfigError, from_mapping
    from heinsen.decoding import Sampling, decode, step_params
    from heinsen.models import count_params, init_model_state, init_params
    from heinsen.parallel import keep_host_memory
    from heinsen.training.run import TrainConfig

    contexts = sorted(positive_int(text, "contexts") for text in CONTEXTS.value)
    batches = [positive_int(text, "batches") for text in BATCHES.value]
    try:
        own = from_mapping(TrainConfig, CONFIG.value.to_dict()).model
        models = {own.attention: own, "softmax": dataclasses.replace(own, attention="softmax")}
    except (ConfigError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    keep_host_memory()
    n_call = CALL_TOKENS.value
    room = n_call * (REPEATS.value + 2)
    params = {name: step_params(m, init_params(m, jax.random.key(0))) for name, m in models.items()}
    n_params = {name: count_params(p) - p["embedding"].size for name, p in params.items()}
    n_bytes = {name: sum(x.nbytes for x in jax.tree.leaves(p)) - p["embedding"].nbytes for name, p in params.items()}
    numbers = jnp.ones(n_bytes[own.attention] // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    read = lambda: add_up(numbers).block_until_ready()
    times: dict[tuple, list[float]] = {"read": []}
    held, left_out = {}, []

    def contestant(name, batch, context):
        model = models[name]
        size = sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(jax.eval_shape(lambda: init_model_state(model, batch, context + room)))
        )
        if (free := device_memory()) is not None and size > 0.9 * free:
            left_out.append(dict(name=name, batch=batch, context=context, state_bytes=size))
            return None
        prefix = made_up_prefix(model, batch, context, room)
        held[name, batch, context] = sum(x.nbytes for x in jax.tree.leaves(prefix.state))
        keys = jax.random.split(jax.random.key(0), batch)

        def call():
            nonlocal prefix
            tokens, prefix, _ = decode(model, params[name], prefix, keys, Sampling(temperature=0.0), n_call)
            return tokens

        return call

    def take_turns(calls: dict):
        calls = {key: call for key, call in calls.items() if call is not None}
        for call in calls.values():
            call()
        for _ in range(REPEATS.value):
            for key, call in [("read", read), *calls.items()]:
                times.setdefault(key, []).append(seconds(call) / (1 if key == "read" else n_call))
        for key in calls:
            print(f"{key}: {1e3 * statistics.median(times[key]):.2f} ms a step", file=sys.stderr, flush=True)

    read()
    constant = {n: not models[n].has_cache for n in models}
    # States of one size are all held at once and take turns; caches come one after the other, for want of memory.
    take_turns(
        {
            (name, batch, context): contestant(name, batch, context)
            for name in models
            if constant[name]
            for batch in batches
            for context in (contexts if batch == batches[0] else contexts[:1])
        }
    )
    for name in models:
        for batch in reversed(batches) if not constant[name] else ():
            for context in contexts if batch == batches[0] else contexts[:1]:
                take_turns({(name, batch, context): contestant(name, batch, context)})

    reading = statistics.median(times.pop("read"))
    results = [
        dict(
            name=name, batch=batch, context=context, milliseconds_per_step=1e3 * statistics.median(t),
            fastest_milliseconds_per_step=1e3 * min(t), tokens_per_second=batch / statistics.median(t),
            state_bytes=held[name, batch, context],
        )
        for (name, batch, context), t in times.items()
    ]  # fmt: skip
    print(f"{device_name()}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    print(
        f"{n_params[own.attention]:,} parameters, {own.dtype}; reading their {n_bytes[own.attention] / 2**20:.0f} MiB "
        f"once takes {1e3 * reading:.1f} ms"
    )
    print(f"{'attention':<20} {'batch':>5} {'context':>9} {'ms a step':>10} {'tokens/s':>9} {'state, MiB':>11}")
    for r in results:
        print(
            f"{r['name']:<20} {r['batch']:>5} {r['context']:>9} {r['milliseconds_per_step']:>10.2f} "
            f"{r['tokens_per_second']:>9.1f} {r['state_bytes'] / 2**20:>11.3f}"
        )
    for r in left_out:
        why = f"left out: a state of {r['state_bytes'] / 2**30:.1f} GiB"
        print(f"{r['name']:<20} {r['batch']:>5} {r['context']:>9}   {why}")
    of = {(r["name"], r["batch"], r["context"]): r for r in results}
    first, last = (of.get((own.attention, batches[0], c)) for c in (contexts[0], contexts[-1]))
    if first and last and first is not last:
        ratio = last["milliseconds_per_step"] / first["milliseconds_per_step"]
        print(f"{own.attention}: a token after {last['context']} takes {ratio:.3f} times that after {first['context']}")
    if first:
        print(f"{own.attention}: {first['milliseconds_per_step'] / 1e3 / reading:.2f} times the reading")
    for batch in batches[1:]:
        if first and (many := of.get((own.attention, batch, contexts[0]))):
            ratio = many["tokens_per_second"] / first["tokens_per_second"]
            print(f"{own.attention}: batch {batch} gives {ratio:.1f} times the tokens/s of batch {batches[0]}")
    out.mkdir(parents=True, exist_ok=True)
    summary = dict(
        device=device_name(), versions=versions(), parameters=n_params[own.attention], dtype=own.dtype,
        read_milliseconds=1e3 * reading, call_tokens=n_call, results=results, left_out=left_out,
        config=CONFIG.value.to_dict(),
    )  # fmt: skip
    (out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot_decode(results, batches[0], summary, out / "decode.png")
    print(f"written: {out / 'results.json'}, {out / 'decode.png'}")


def plot_decode(results: list[dict], batch: int, summary: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    fields = ("milliseconds_per_step", 1.0, "ms per token"), ("state_bytes", 2.0**-20, "MiB of state")
    for ax, (field, scale, label) in zip(axes, fields, strict=True):
        for name in dict.fromkeys(r["name"] for r in results):
            of = [r for r in results if r["name"] == name and r["batch"] == batch]
            ax.plot([r["context"] for r in of], [scale * r[field] for r in of], "o-", label=name)
        lost = [r for r in summary["left_out"] if r["batch"] == batch]
        if field == "state_bytes" and lost:
            style = dict(marker="x", linestyle="none", color="grey", label="does not fit here")
            ax.plot([r["context"] for r in lost], [scale * r[field] for r in lost], **style)
        ax.set(xscale="log", yscale="log", xlabel="tokens read before", ylabel=label)
        ax.grid(True, which="both", alpha=0.3)
        ax.legend()
    axes[0].axhline(summary["read_milliseconds"], color="grey", linestyle=":")
    axes[0].set_ylim(bottom=0.6 * summary["read_milliseconds"])
    place = dict(xytext=(-4, -4), textcoords="offset points", ha="right", va="top")
    axes[0].annotate("parameters read once", (axes[0].get_xlim()[1], summary["read_milliseconds"]), **place)
    figure.suptitle(f"decoding, {summary['parameters'] / 1e6:.0f}M parameters, batch {batch}: {summary['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


BENCHMARKS = {"attention": benchmark_attention, "step": benchmark_step, "decode": benchmark_decode}


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"expected one of {', '.join(BENCHMARKS)}, got {argv[1:]}")
    BENCHMARKS[argv[1]](Path(OUT.value or f"benchmarks/{argv[1]}"))


if __name__ == "__main__":
    from configs import parse_flags

    app.run(main, flags_parser=parse_flags)
