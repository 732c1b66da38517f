"""A plan's figures, as text and as JSON."""

import dataclasses
import json
from typing import Any

from heinsen.plan.costs import Costs
from heinsen.quantities import count, format_bytes
from heinsen.training.devices import train_flops_per_token

_ASSUMED_MFU = (0.2, 0.4)  # where there is neither a timed step nor a bound
_REACHED = (0.52, 0.81)  # of the bound, by the steps of three models on an H200 (bench/h200_step*.json)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Size, memory and time of a run.

    bytes_* are per device, by XLA's analysis of the compiled step: of the parameters and optimizer state, and of all
    that exists at once in a step (with the batch, gradients and activations); bytes_device is the device's memory,
    where it is known. peak_flops is of all devices. seconds_per_step is None if no step was timed, for the reason
    not_timed. target is the name of the machine that is planned for, None: the devices here. costs are those of one
    step on one device, None: the chip is not known, or the step does not fit and was not compiled. notes say what slows
    the model there. stage is the name of the part of a conversion that is planned, which the totals are of; else it is
    empty.
    """

    n_devices: int
    device: str
    mesh: dict[str, int]
    n_params: int
    batch_size: int
    sequence_length: int
    total_tokens: int
    total_steps: int
    bytes_state: int
    bytes_step: int
    peak_flops: float
    bytes_device: int | None = None
    seconds_compiling: float = 0.0
    seconds_per_step: float | None = None
    not_timed: str | None = None
    target: str | None = None
    costs: Costs | None = None
    notes: tuple[str, ...] = ()
    stage: str = ""

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def flops_per_step(self) -> float:
        return train_flops_per_token(self.n_params) * self.tokens_per_step

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into a device's memory; None if that is not known."""
        return None if self.bytes_device is None else self.bytes_step <= self.bytes_device

    @property
    def expected_seconds(self) -> tuple[float, float] | None:
        """The least and the most seconds that a step is expected to take, by its bound; None without one."""
        return None if self.costs is None else (self.costs.seconds / _REACHED[1], self.costs.seconds / _REACHED[0])

    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        target = f" ({self.target}, by its compiler)" if self.target else ""
        rows = [
            *([("stage", self.stage)] if self.stage else []),
            ("devices", f"{self.n_devices} x {self.device}{target}; {shape}"),
            ("parameters", f"{self.n_params:,}"),
            ("step", f"{self.batch_size} x {self.sequence_length} tokens = {self.tokens_per_step:,}"),
            ("run", f"{self.total_tokens:,} tokens, {count(self.total_steps, 'step')}"),
            ("state per device", f"{format_bytes(self.bytes_state)} (parameters and optimizer)"),
            ("memory per device", self._describe_memory()),
            (
                "FLOPs per step",
                f"{self.flops_per_step:.3g} (6 N per token); peak {self.peak_flops:.3g} FLOP/s of all devices",
            ),
            ("compile time", f"{self.seconds_compiling:.0f} s"),
            *self._cost_rows(),
            *self._time_rows(),
            *(("note", note) for note in self.notes),
        ]
        lines = [f"{name:<17} {text}" for name, text in rows]
        if self.costs is not None:
            lines += ["costliest operations, by their bounds:", "      ms  share  kernels        GB  name"]
            for name, x in self.costs.costliest():
                ms, share = 1e3 * x.seconds, x.seconds / self.costs.total.seconds
                lines.append(f"{ms:8.2f}  {share:5.1%}  {x.kernels:7,}  {format_gigabytes(x.n_bytes):>8}  {name}")
        if self.target is not None or self.costs is not None:
            lines.append(json.dumps(self.figures()))
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """Return everything that the plan says, ready for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "costs"}
        fields |= {"tokens_per_step": self.tokens_per_step, "flops_per_step": self.flops_per_step, "fits": self.fits}
        if self.costs is None:
            return fields
        bound = self.costs.seconds
        at_bound = {
            "bound_seconds_per_step": bound,
            "bound_tokens_per_second": self.tokens_per_step / bound,
            "bound_mfu": self.flops_per_step / bound / self.peak_flops,
            "bound_hours": bound * self.total_steps / 3600,
            "bound_device_hours": bound * self.total_steps / 3600 * self.n_devices,
            "expected_seconds_per_step": self.expected_seconds,
        }
        return fields | at_bound | {"costs": self.costs.figures()}

    def _describe_memory(self) -> str:
        text = f"{format_bytes(self.bytes_step)} in a step, by XLA's analysis"
        if self.bytes_device is None:
            return text
        verdict = "" if self.target is None else ": it fits" if self.fits else ": IT DOES NOT FIT"
        return f"{text}, of {format_bytes(self.bytes_device)}{verdict}"

    def _cost_rows(self) -> list[tuple[str, str]]:
        """Costs of a step on one device, and the bound that follows."""
        if self.costs is None:
            return []
        figures, total = self.figures(), self.costs.total
        products = ", ".join(f"{kind} {flops:.3g}" for kind, flops in sorted(total.flops.items()))
        sent = sorted(self.costs.collectives.items())
        collectives = ", ".join(f"{x.kernels} {kind} ({format_gigabytes(x.n_bytes)} GB)" for kind, x in sent)
        n_loops = len(self.costs.loops_not_counted)
        loops = f"; {n_loops} loops whose length depends on data count as not run" if n_loops else ""
        return [
            ("kernels", f"{total.kernels:,} per step{loops}"),
            ("bytes moved", f"{format_gigabytes(total.n_bytes)} GB per step and device"),
            ("matrix products", f"{products or 0} FLOPs per step and device"),
            ("collectives", f"{collectives or 'none'} per step and device"),
            (
                "bound",
                f"{self.costs.seconds:.3g} s per step at least, {figures['bound_tokens_per_second']:,.0f} tokens/s and "
                f"MFU {figures['bound_mfu']:.1%} at most",
            ),
        ]

    def _time_rows(self) -> list[tuple[str, str]]:
        """The time of a step and of the run: measured, or at the bound, or at assumed rates."""
        rows: list[tuple[str, str]] = []
        if self.seconds_per_step is not None:
            mfu = self.flops_per_step / self.seconds_per_step / self.peak_flops
            rate = self.tokens_per_step / self.seconds_per_step
            rows = [("time per step", f"{self.seconds_per_step:.3g} s, {rate:,.0f} tokens/s, MFU {mfu:.1%}")]
            seconds = {"measured": self.seconds_per_step}
        elif self.expected_seconds is not None and self.costs is not None:
            least, most = self.expected_seconds
            rates = f"{self.tokens_per_step / most:,.0f} to {self.tokens_per_step / least:,.0f} tokens/s"
            shares = f"{_REACHED[0]:.0%} to {_REACHED[1]:.0%} of the bound, as measured on an H200"
            rows = [("expected", f"{least:.3g} to {most:.3g} s per step, {rates}: {shares}")]
            seconds = {"at the bound": self.costs.seconds, "expected, at most": most}
        else:
            seconds = {f"if MFU were {mfu:.0%}": self.flops_per_step / (mfu * self.peak_flops) for mfu in _ASSUMED_MFU}
        if self.target is None and self.seconds_per_step is None:
            rows.append(("time", f"not measured: {self.not_timed}"))
        if self.fits is False and self.target is not None:
            return rows
        for label, each in seconds.items():
            hours = each * self.total_steps / 3600
            whole = "stage" if self.stage else "run"
            total = f"{_format_hours(hours)} for the whole {whole}, {hours * self.n_devices:,.1f} device-hours"
            rows.append((label, total + (" at least" if label == "at the bound" else "")))
        return rows


def format_gigabytes(n_bytes: float) -> str:
    """Return 10^9 bytes as a number."""
    return f"{n_bytes / 1e9:,.1f}" if n_bytes >= 1e9 else f"{n_bytes / 1e9:.2g}"


def _format_hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"
