"""Bounds of attention on a machine that need not be there: forward and backward pass, compiled by its compiler."""

import functools
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

import heinsen
from heinsen.contrib.hlo_cost import count_costs
from heinsen.errors import HeinsenError, InputError
from heinsen.files import make_folder
from heinsen.ops.api import IMPLEMENTATIONS
from heinsen.plan.report import format_gigabytes
from heinsen.plan.targets import Target, find_target
from scripts.benchmarking.measure import describe_versions, versions, write_results

_N_ARRAYS = 8  # q, k, log v, the output, its gradient, and those of the inputs


@dataclass(frozen=True)
class Settings:
    """A target's name, the shape [B, H, T, K], dtypes, and names of implementations; []: all."""

    target: str | None
    shape: list[int]
    dtypes: list[str]
    only: list[str]

    def __post_init__(self) -> None:
        if self.target is None:
            raise InputError("--target=MACHINE is missing, such as h200, v5e-4, v5p-8")
        if len(self.shape) != 4:
            raise InputError(f"--shape={','.join(map(str, self.shape))}: expected B,H,T,K, four numbers")
        for name in self.only:
            if name not in IMPLEMENTATIONS:
                raise InputError(f"--only: there is no implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
        for dtype in self.dtypes:
            if dtype not in ("float32", "bfloat16", "float16"):
                raise InputError(f"--dtypes: {dtype!r} is none of float32, bfloat16, float16")


def find_bounds(settings: Settings, out: Path) -> str:
    """Compile every implementation, write OUT/results.json, and return the report. Raises TargetError, InputError."""
    assert settings.target is not None
    target = find_target(settings.target)
    device = target.devices()[0]
    make_folder(out)
    results: list[dict[str, Any]] = []
    least = {dtype: _N_ARRAYS * math.prod(settings.shape) * jnp.dtype(dtype).itemsize for dtype in settings.dtypes}
    summary = dict(settings=asdict(settings), versions=versions(), least_bytes=least, results=results)
    for dtype in settings.dtypes:
        for name in settings.only or IMPLEMENTATIONS:
            print(f"compiling {name}, {dtype} ...", file=sys.stderr, flush=True)
            results.append(dict(implementation=name, dtype=dtype, **_bound(settings, target, device, name, dtype)))
            path = write_results(out, summary)  # so far: a process that is stopped leaves what it has found
    return "\n".join([*_report(settings, target, least, results), f"written: {path}"])


def _bound(settings: Settings, target: Target, device: jax.Device, name: str, dtype: str) -> dict[str, Any]:
    """Return the costs of one implementation; "failed": why it does not compile for the target."""
    # The compiler's own choice, as in a model, where it makes the arrays, too.
    layout = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(device))
    x = jax.ShapeDtypeStruct(tuple(settings.shape), dtype)

    def with_gradient(q: jax.Array, k: jax.Array, log_v: jax.Array, grad: jax.Array) -> Any:
        y, pull = jax.vjp(functools.partial(heinsen.log_attention, implementation=name), q, k, log_v)
        return y, pull(grad.astype(y.dtype))

    try:
        with target.compiling():
            step = jax.jit(with_gradient, in_shardings=layout, out_shardings=layout)
            compiled = step.lower(x, x, x, x).compile()
    except (HeinsenError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return dict(failed=str(error).splitlines()[0])
    costs = count_costs(compiled.as_text() or "", target.chip)
    memory: Any = compiled.memory_analysis()
    return dict(seconds=costs.seconds, temporary_bytes=memory.temp_size_in_bytes, **costs.figures())


def _report(settings: Settings, target: Target, least: dict[str, int], results: list[dict[str, Any]]) -> list[str]:
    b, h, t, k = settings.shape
    lines = [
        f"one {target.chip.device_kind}, by its compiler; {describe_versions()}",
        f"attention of {b} x {h} heads x {t} tokens x {k} features, forward and backward",
        "",
        "| implementation | dtype | kernels | GB moved | times the least | bound, ms |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        start = f"| {result['implementation']} | {result['dtype']} |"
        if "failed" in result:
            lines.append(f"{start} does not compile: {result['failed']} | | | |")
            continue
        times = result["bytes"] / least[result["dtype"]]
        moved = format_gigabytes(result["bytes"])
        lines.append(f"{start} {result['kernels']:,} | {moved} | {times:.1f} | {1e3 * result['seconds']:.3g} |")
    for dtype, n_bytes in least.items():
        seconds = n_bytes / target.chip.bandwidth
        lines.append(
            f"least, {dtype}: {format_gigabytes(n_bytes)} GB of inputs, output and gradients, {1e3 * seconds:.3g} ms"
        )
    return lines
