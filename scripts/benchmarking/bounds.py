"""Lower bounds of the time of attention's two passes on a machine, by its compiler. Nothing runs."""

from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from heinsen.contrib.hlo_cost import count_costs
from heinsen.errors import HeinsenError
from heinsen.plan.report import format_gigabytes
from heinsen.plan.targets import Target, find_target
from scripts.benchmarking import measure
from scripts.benchmarking.attention import Settings
from scripts.benchmarking.contestants import BACKWARD, JaxContestant, Shape, SkipError, jax_contestants


def find_bounds(settings: Settings, machine: str, out: Path) -> str:
    """Bound every contestant at every shape, write OUT/results.json, and return the report.

    Raises TargetError, InputError.
    """
    target = find_target(machine)
    # The layouts are the compiler's own choice, as in a model, where it makes the arrays, too.
    layout = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(target.devices()[0]))
    with target.compiling():
        contestants = settings.choose(jax_contestants(settings.inputs))
    described = measure.machine() | dict(device=machine, shape=settings.describe())
    lines = [f"{settings.describe()}, forward and backward; {measure.describe_machine(described)}"]
    results: list[dict[str, Any]] = []
    shapes = [settings.shape(length, dtype) for dtype in settings.dtypes or ("float32",) for length in settings.lengths]
    for shape in shapes:
        for name, contestant in contestants.items():
            start = f"{name}, {shape.dtype}, T={shape.n_tokens}"
            measure.tell(start)
            try:
                found = find_bound(contestant, shape, target, layout)
            except SkipError as reason:
                lines.append(f"{start}: left out: {reason}")
                continue
            lines.append(f"{start}, {describe(found)}")
            results.append(dict(name=name, dtype=shape.dtype, tokens=shape.n_tokens) | found)
            measure.write_results(out, described | dict(results=results))
    return "\n".join(lines)


def find_bound(contestant: JaxContestant, shape: Shape, target: Target, layout: Format) -> dict[str, Any]:
    """Return the costs of both passes and the bound that follows. Raises SkipError."""
    arrays = jax.eval_shape(lambda: contestant.draw(shape))
    try:
        with target.compiling():
            run = jax.jit(contestant.pass_for(BACKWARD), in_shardings=layout, out_shardings=layout)
            compiled = run.lower(arrays).compile()
    except (HeinsenError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise SkipError(f"does not compile: {str(error).splitlines()[0]}") from error
    costs = count_costs(compiled.as_text() or "", target.chip)
    least = 2 * sum(x.size * x.dtype.itemsize for x in arrays.values())  # inputs, output and all gradients once
    found = dict(bound_seconds=costs.seconds, least_bytes=least, least_seconds=least / target.chip.bandwidth)
    return found | costs.figures()


def describe(found: dict[str, Any]) -> str:
    return (
        f"{found['kernels']:,} kernels, {format_gigabytes(found['bytes'])} GB moved, "
        f"{found['bytes'] / found['least_bytes']:.1f} times the least; bound {1e3 * found['bound_seconds']:.3g} ms, of "
        f"the least {1e3 * found['least_seconds']:.3g} ms"
    )
