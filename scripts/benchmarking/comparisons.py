"""Forward and backward pass of attention in three more respects: other inputs, compile time, bounds for a machine."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from heinsen.contrib.hlo_cost import count_costs
from heinsen.errors import HeinsenError, InputError
from heinsen.host import keep_host_memory
from heinsen.plan.report import format_gigabytes
from heinsen.plan.targets import find_target
from scripts.benchmarking import measure
from scripts.benchmarking.attention import Settings
from scripts.benchmarking.contestants import BACKWARD, INPUTS, SOFTMAX, JaxContestant, Shape, SkipError, jax_contestants

Result = dict[str, Any]


def compare_inputs(settings: Settings, inputs: Sequence[str], out: Path) -> str:
    """Time each kind of inputs, in turn, as multiples of the first kind's time."""
    for kind in inputs:
        if kind not in INPUTS:
            raise InputError(f"--inputs={kind}: choose among {', '.join(INPUTS)}")
    keep_host_memory()

    def compare(contestant: JaxContestant, shape: Shape) -> list[Result]:
        calls = {kind: contestant.prepare(shape, BACKWARD, kind).call for kind in inputs}
        times = measure.time_in_turn(calls, settings.repeats)
        first = statistics.median(times[inputs[0]])
        return [dict(inputs=kind, ratio=statistics.median(x) / first, seconds=x) for kind, x in times.items()]

    describe = lambda r: f"{r['inputs']}: {r['ratio']:.2f} times as long as with {inputs[0]} inputs"
    return _compare(settings, compare, describe, measure.machine(), out)


def compare_compilation(settings: Settings, out: Path) -> str:
    """Time compilation, in turn with that of JAX's softmax attention."""
    jax.config.update("jax_enable_compilation_cache", False)
    softmax = jax_contestants()[SOFTMAX]

    def compile_anew(contestant: JaxContestant, arguments: list[jax.Array]) -> float:
        jax.clear_caches()
        return measure.seconds(lambda: contestant.compile(BACKWARD, arguments))

    def compare(contestant: JaxContestant, shape: Shape) -> list[Result]:
        arguments, of_softmax = contestant.draw(shape), softmax.draw(shape)
        compile_anew(contestant, arguments), compile_anew(softmax, of_softmax)  # a process's first take longer
        pairs = [
            (compile_anew(contestant, arguments), compile_anew(softmax, of_softmax)) for _ in range(settings.repeats)
        ]
        here, there = map(list, zip(*pairs, strict=True))
        ratio = statistics.median(here) / statistics.median(there)
        return [dict(ratio=ratio, seconds=here, softmax_seconds=there)]

    describe = lambda r: (
        f"compiles in {statistics.median(r['seconds']):.2f} s, {r['ratio']:.2f} times as long as {SOFTMAX}"
    )
    return _compare(settings, compare, describe, measure.machine(), out)


def find_bounds(settings: Settings, machine: str, out: Path) -> str:
    """Bound the time on a machine by its compiler; nothing runs. Raises TargetError, InputError."""
    target = find_target(machine)
    # The layouts are the compiler's own choice, as in a model, where it makes the arrays, too.
    layout = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(target.devices()[0]))

    def bound(contestant: JaxContestant, shape: Shape) -> list[Result]:
        arguments = jax.eval_shape(lambda: contestant.draw(shape))
        try:
            with target.compiling():
                run = jax.jit(contestant.pass_for(BACKWARD), in_shardings=layout, out_shardings=layout)
                compiled = run.lower(*arguments).compile()
        except (HeinsenError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise SkipError(f"does not compile: {str(error).splitlines()[0]}") from error
        costs = count_costs(compiled.as_text() or "", target.chip)
        least = 2 * sum(x.size * x.dtype.itemsize for x in arguments)  # inputs, output and all gradients once
        found = dict(bound_seconds=costs.seconds, least_bytes=least, least_seconds=least / target.chip.bandwidth)
        return [found | costs.figures()]

    describe = lambda r: (
        f"{r['kernels']:,} kernels, {format_gigabytes(r['bytes'])} GB moved, {r['bytes'] / r['least_bytes']:.1f} times "
        f"the least; bound {1e3 * r['bound_seconds']:.3g} ms, of the least {1e3 * r['least_seconds']:.3g} ms"
    )
    return _compare(settings, bound, describe, measure.machine() | dict(device=machine), out)


def _compare(
    settings: Settings,
    compare: Callable[[JaxContestant, Shape], list[Result]],
    describe: Callable[[Result], str],
    machine: dict[str, Any],
    out: Path,
) -> str:
    """Compare every contestant at every shape, write OUT/results.json, and return a line for each result."""
    results: list[Result] = []
    lines = [f"{settings.describe()}, forward and backward; {measure.describe_machine(machine)}"]
    shapes = [
        settings.shape(n_tokens, dtype) for dtype in settings.dtypes or ("float32",) for n_tokens in settings.lengths
    ]
    for shape in shapes:
        for name, contestant in settings.choose(jax_contestants()).items():
            start = f"{name}, {shape.dtype}, T={shape.n_tokens}"
            measure.tell(start)
            try:
                found = compare(contestant, shape)
            except SkipError as reason:
                lines.append(f"{start}: left out: {reason}")
                continue
            lines += [f"{start}, {describe(each)}" for each in found]
            results += [dict(name=name, dtype=shape.dtype, tokens=shape.n_tokens) | each for each in found]
            measure.write_results(out, machine | dict(shape=settings.describe(), results=results))
    return "\n".join(lines)
