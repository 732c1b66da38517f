"""Costs of one call of a compiled program on a chip: kernels, bytes, FLOPs, collectives, a lower bound of its time.

Counted from the optimized HLO (`hlo`), which says what is fused, in which order, and where arrays lie:

  * A kernel is an instruction that is scheduled by itself, most often a fusion. It reads its operands and writes its
    results once. What it slices counts as the slice, what it updates in place as the update (`traffic`). Arrays on the
    chip (memory spaces of TPUs) count nothing; on TPUs the padding of tiles counts.
  * FLOPs are those of matrix products and convolutions, by the kind of product that the chip makes of them
    (`products`).
  * Loops count as often as they run (`loops`). A loop whose length depends on data counts as not run, and of branches
    the cheapest is taken: the exact attention, which ordinary inputs do not need, is behind such.
  * A collective counts the bytes that each device must at least send.

The bound adds, for each kernel, the larger of bytes / bandwidth and FLOPs / rate, and the time of a launch. Collectives
and copies that run beside kernels are taken to overlap with all of it, as far as all bytes / bandwidth allows.
"""

import itertools
import math
import re
from collections import Counter

from heinsen.chips import Chip
from heinsen.contrib.hlo_cost.hlo import Computation, Instruction, Module, parse_module
from heinsen.contrib.hlo_cost.loops import find_trip_count
from heinsen.contrib.hlo_cost.products import product_flops
from heinsen.contrib.hlo_cost.traffic import moved_bytes
from heinsen.plan.costs import Costs, Operation

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"}
_FREE |= {"add-dependency", "domain", "partition-id", "replica-id", "call-done", "send-done", "recv-done"}
_FREE_CALLS = {"AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "AssumeGatherIndicesInBound"}
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"}
_COLLECTIVES |= {"collective-broadcast"}


def count_costs(text: str, chip: Chip, n_devices: int = 1) -> Costs:
    """Count the costs of a program that is compiled for n_devices of a chip; text: of `compiled.as_text()`."""
    module = parse_module(text)
    return _Counter(module, chip, n_devices).count(module.entry)


class _Counter:
    """Counts the costs of a module's computations, each of them once."""

    def __init__(self, module: Module, chip: Chip, n_devices: int) -> None:
        self.module, self.chip, self.n_devices = module, chip, n_devices
        self._counted: dict[str, Costs] = {}

    def count(self, computation: Computation) -> Costs:
        """The costs of running a computation once."""
        if computation.name not in self._counted:
            costs = self._counted[computation.name] = Costs(self.chip)
            channels: set[str] = set()  # a collective in several parts has one channel
            for instruction in computation.instructions.values():
                self._add_instruction(costs, computation, instruction, channels)
        return self._counted[computation.name]

    def _add_instruction(
        self, costs: Costs, computation: Computation, instruction: Instruction, channels: set[str]
    ) -> None:
        called, opcode = self.module.called, instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return
        if opcode == "while":
            trips = find_trip_count(self.module, computation, instruction)
            if trips is None:
                costs.loops_not_counted.add(instruction.name)
                costs.add(self.count(called(instruction, "condition")[0]))
            else:
                costs.add(self.count(called(instruction, "body")[0]), trips)
        elif opcode == "conditional":
            branches = called(instruction, "branch_computations", "true_computation", "false_computation")
            costs.add(min(map(self.count, branches), key=lambda branch: branch.total.seconds))
        elif opcode in ("call", "async-start"):
            for inner in called(instruction, "to_apply", "calls", "called_computation"):
                costs.add(self.count(inner))
        elif opcode.removesuffix("-start") in _COLLECTIVES:
            self._add_collective(costs, computation, instruction, channels)
        else:
            self._add_fused_collectives(costs, instruction, channels)
            self._add_kernel(costs, computation, instruction)

    def _add_kernel(self, costs: Costs, computation: Computation, instruction: Instruction) -> None:
        if instruction.opcode == "custom-call" and instruction.text(r'custom_call_target="([^"]*)"') in _FREE_CALLS:
            return
        n_bytes = moved_bytes(self.module, computation, instruction)
        flops = self._flops(computation, instruction)
        if self.chip.platform == "tpu" and not n_bytes and not flops:
            return  # scalars, and what stays on the chip
        compute = sum(n / self.chip.rate(kind) for kind, n in flops.items())
        transfer = 0.0 if instruction.opcode.endswith("-start") else n_bytes / self.chip.bandwidth
        seconds = max(transfer, compute) + self.chip.launch
        costs.operations.setdefault(self._label(instruction), Operation()).add(Operation(1, n_bytes, flops, seconds))

    def _flops(self, computation: Computation, instruction: Instruction) -> Counter[str]:
        """FLOPs of the products in a kernel, by the kind of product."""
        if instruction.opcode.removesuffix("-start") != "fusion":
            return product_flops(computation, instruction, self.chip.platform)
        inner = self.module.called(instruction, "calls")[0]
        return sum((self._flops(inner, x) for x in inner.instructions.values()), Counter())

    def _label(self, instruction: Instruction) -> str:
        name = describe_op_name(instruction.op_name) or re.sub(r"[.\d]+$", "", instruction.name)
        source = self.module.source(instruction)
        return f"{name} ({source})" if source else name

    def _add_fused_collectives(self, costs: Costs, fusion: Instruction, channels: set[str]) -> None:
        for fused in self.module.called(fusion, "calls") if fusion.opcode == "fusion" else []:
            for instruction in fused.instructions.values():
                self._add_fused_collectives(costs, instruction, channels)
                if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
                    self._add_collective(costs, fused, instruction, channels)

    def _add_collective(
        self, costs: Costs, computation: Computation, instruction: Instruction, channels: set[str]
    ) -> None:
        channel = instruction.text(r"\bchannel_id=(\d+)")
        if channel and channel in channels:
            return
        channels.add(channel)
        kind = instruction.opcode.removesuffix("-start")
        arrays = [x for name in instruction.operands for x in computation.instructions[name].arrays]
        n_bytes = float(sum(x.n_bytes for x in arrays))
        size = group_size(instruction, self.n_devices)
        if kind == "all-gather":  # to each other device its own part
            n_bytes *= size - 1
        elif kind != "collective-permute":
            n_bytes *= (size - 1) / size
        if n_bytes:
            costs.collectives.setdefault(kind, Operation()).add(Operation(1, n_bytes))
            if self.chip.launch:
                launch = Operation(1, seconds=self.chip.launch)
                costs.operations.setdefault(self._label(instruction), Operation()).add(launch)


def group_size(instruction: Instruction, n_devices: int) -> int:
    """Number of devices that exchange data in a collective: of its first group. Raises ValueError."""
    text = instruction.attributes
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])  # a part of an axis: 'a':(2)4
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    if "replica_groups=" not in text or "replica_groups={}" in text:
        return n_devices
    raise ValueError(f"the groups of a collective are written in an unknown form: {text[:200]}")


_NOISE = re.compile(
    r"(while|body|cond|closed_call|eval_jaxpr|checkpoint|shard_map|rematted_computation|branch_\d+_fun|.*_scan_layers|"
    r"jit\(.*|jvp\(.*|transpose\(jvp.*|)$"
)


def describe_op_name(path: str) -> str:
    """Shorten JAX's path of names to direction and place: "backward layers.attend/dot_general"."""
    if "rematted_computation" in path:
        direction = "recomputed "
    elif "transpose(jvp" in path:
        direction = "backward "
    else:
        direction = "forward " if "jvp(" in path else ""
    parts = [part for part in path.split("/") if not _NOISE.match(part)]
    following = itertools.zip_longest(parts, parts[1:], fillvalue="")
    kept = [part for part, after in following if not after.startswith(f"{part}.")]  # layers/layers.attend: the latter
    return direction + "/".join(kept) if kept else ""
