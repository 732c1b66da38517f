"""Costs of one call of a compiled program on a chip: kernels, bytes, FLOPs, collectives, a lower bound of its time.

Counted from the optimized HLO (`hlo`), which says what is fused, in which order, and where arrays lie:

  * A kernel is an instruction that is scheduled by itself, most often a fusion. It reads its operands and writes its
    results once. What it slices counts as the slice, what it updates in place as the update. Arrays on the chip (memory
    spaces of TPUs) count nothing; on TPUs the padding of tiles counts.
  * FLOPs are those of matrix products and convolutions, by the kind of product that the chip makes of them.
  * Loops count as often as they run. A loop whose length depends on data counts as not run, and of branches the
    cheapest is taken: the exact repair of lost terms, which ordinary inputs do not need, is behind such.
  * A collective counts the bytes that each device must at least send.

The bound adds, for each kernel, the larger of bytes / bandwidth and FLOPs / rate, and the time of a launch. Collectives
and copies that run beside kernels are taken to overlap with all of it, as far as all bytes / bandwidth allows.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter

from heinsen.chips import Chip
from heinsen.planning.hlo import Computation, Instruction, Module, parse_module
from heinsen.planning.loops import find_trip_count
from heinsen.planning.products import product_flops

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"}
_FREE |= {"add-dependency", "domain", "partition-id", "replica-id", "iota", "call-done", "send-done", "recv-done"}
_FREE_CALLS = {"AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "AssumeGatherIndicesInBound"}
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"}
_COLLECTIVES |= {"collective-broadcast"}
_SLICES = {"slice", "dynamic-slice", "gather"}
_TRANSPARENT = {"bitcast", "reshape", "copy", "convert"}  # between an update in place and the result


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kernels of one name: how many run, the bytes they move, their FLOPs by kind, and their bound in seconds."""

    kernels: int = 0
    n_bytes: float = 0.0
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    def __add__(self, other: "Operation") -> "Operation":
        return Operation(
            self.kernels + other.kernels,
            self.n_bytes + other.n_bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )

    def times(self, n: int) -> "Operation":
        flops = Counter({kind: n * value for kind, value in self.flops.items()})
        return Operation(n * self.kernels, n * self.n_bytes, flops, n * self.seconds)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one call of a program, per device.

    Attributes:
      operations: by name, the part of the model and the line of Python that made them.
      collectives: of each kind, how many run and the bytes that a device must send.
      seconds_moving: all bytes that kernels and copies move, by the memory's bandwidth.
      seconds_collectives: the bytes of collectives, by the interconnect's rate.
      loops_not_counted: loops whose length depends on data; they count as not run.
    """

    operations: dict[str, Operation]
    collectives: dict[str, tuple[int, float]]
    seconds_moving: float
    seconds_collectives: float
    loops_not_counted: int

    @functools.cached_property
    def total(self) -> Operation:
        return sum(self.operations.values(), Operation())

    @property
    def seconds(self) -> float:
        """Lower bound of the time of one call."""
        return max(self.total.seconds, self.seconds_moving, self.seconds_collectives)

    def costliest(self, n: int) -> list[tuple[str, Operation]]:
        """The n operations with the largest bounds, the largest first."""
        return sorted(self.operations.items(), key=lambda item: -item[1].seconds)[:n]


def count_costs(text: str, chip: Chip, n_devices: int = 1) -> Costs:
    """Count the costs of a program that is compiled for n_devices of a chip; text: of `compiled.as_text()`."""
    return _Counter(parse_module(text), chip, n_devices).costs()


@dataclasses.dataclass
class _Tally:
    """The costs of running a computation once."""

    operations: dict[str, Operation] = dataclasses.field(default_factory=dict)
    collectives: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    loops: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: "_Tally", times: int = 1) -> None:
        for name, operation in other.operations.items():
            self.add_operation(name, operation.times(times))
        for kind, (n, n_bytes) in other.collectives.items():
            self.add_collective(kind, times * n, times * n_bytes)
        self.loops |= other.loops

    def add_operation(self, name: str, operation: Operation) -> None:
        self.operations[name] = self.operations.get(name, Operation()) + operation

    def add_collective(self, kind: str, n: int, n_bytes: float) -> None:
        before = self.collectives.get(kind, (0, 0.0))
        self.collectives[kind] = before[0] + n, before[1] + n_bytes

    @property
    def seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations.values())


class _Counter:
    """Counts the costs of a module; each computation once."""

    def __init__(self, module: Module, chip: Chip, n_devices: int) -> None:
        self.module, self.chip, self.n_devices = module, chip, n_devices
        self._tallies: dict[str, _Tally] = {}
        self._traffic: dict[str, Traffic] = {}

    def costs(self) -> Costs:
        total = self.tally(self.module.entry)
        moved = sum(operation.n_bytes for operation in total.operations.values())
        sent = sum(n_bytes for _, n_bytes in total.collectives.values())
        return Costs(
            operations=total.operations,
            collectives=total.collectives,
            seconds_moving=moved / self.chip.bandwidth,
            seconds_collectives=sent / self.chip.interconnect,
            loops_not_counted=len(total.loops),
        )

    def tally(self, computation: Computation) -> _Tally:
        if computation.name not in self._tallies:
            tally = _Tally()
            channels: set[str] = set()  # a collective in several parts has one channel
            for instruction in computation.instructions.values():
                self._add_instruction(tally, computation, instruction, channels)
            self._tallies[computation.name] = tally
        return self._tallies[computation.name]

    def _add_instruction(
        self, tally: _Tally, computation: Computation, instruction: Instruction, channels: set[str]
    ) -> None:
        called = lambda *keys: [self.module.computations[x] for key in keys for x in instruction.names(key)]
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done") or opcode.endswith("-update"):
            return
        if opcode == "while":
            self._add_loop(tally, computation, instruction)
        elif opcode == "conditional":
            branches = called("branch_computations", "true_computation", "false_computation")
            tally.add(min(map(self.tally, branches), key=lambda branch: branch.seconds))
        elif opcode in ("call", "async-start"):
            for computation in called("to_apply", "calls", "called_computation"):
                tally.add(self.tally(computation))
        elif (kind := opcode.removesuffix("-start")) in _COLLECTIVES:
            self._add_collective(tally, computation, instruction, kind, channels)
        else:
            for inner in called("calls") if opcode == "fusion" else []:
                self._add_fused_collectives(tally, inner, channels)
            self._add_kernel(tally, computation, instruction)

    def _add_loop(self, tally: _Tally, computation: Computation, instruction: Instruction) -> None:
        trips = find_trip_count(self.module, computation, instruction)
        if trips is None:
            tally.loops.add(instruction.name)
            tally.add(self.tally(self.module.computations[instruction.names("condition")[0]]))
        else:
            tally.add(self.tally(self.module.computations[instruction.names("body")[0]]), trips)

    def _add_kernel(self, tally: _Tally, computation: Computation, instruction: Instruction) -> None:
        if instruction.opcode == "custom-call" and instruction.text(r'custom_call_target="([^"]*)"') in _FREE_CALLS:
            return
        n_bytes, flops = self.moved_bytes(computation, instruction), self.flops(computation, instruction)
        if self.chip.platform == "tpu" and not n_bytes and not flops:
            return  # scalars, and what stays on the chip
        compute = sum(n / self.chip.rate(kind) for kind, n in flops.items())
        transfer = 0.0 if instruction.opcode.endswith("-start") else n_bytes / self.chip.bandwidth
        seconds = max(transfer, compute) + self.chip.launch
        tally.add_operation(self.label(instruction), Operation(1, n_bytes, flops, seconds))

    def label(self, instruction: Instruction) -> str:
        name = describe_op_name(instruction.op_name) or re.sub(r"[.\d]+$", "", instruction.name)
        source = self.module.source(instruction)
        return f"{name} ({source})" if source else name

    # ---- bytes ----

    def moved_bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Bytes that a kernel reads and writes in main memory."""
        if instruction.opcode == "fusion":
            traffic = self.traffic(self.module.computations[instruction.names("calls")[0]])
        else:
            traffic = _traffic_of_one(computation, instruction)
        read: dict[str, float] = {}  # an operand that is given twice is read once
        for index, name in enumerate(instruction.operands):
            read[name] = max(read.get(name, 0.0), traffic.reads.get(index, 1.0))
        total = 0.0
        for name, fraction in read.items():
            arrays = computation.instructions[name].arrays
            total += fraction * sum(x.n_bytes for x in arrays if x.memory_space == 0)
        for index, array in enumerate(instruction.arrays):
            total += traffic.writes.get(index, 1.0) * array.n_bytes * (array.memory_space == 0)
        return total

    def traffic(self, fused: Computation) -> "Traffic":
        """What a fused computation reads of its parameters and writes of its results."""
        if fused.name not in self._traffic:
            self._traffic[fused.name] = self._find_traffic(fused)
        return self._traffic[fused.name]

    def _find_traffic(self, fused: Computation) -> "Traffic":
        root = fused.root
        outputs = [fused.instructions[x] for x in root.operands] if root.opcode == "tuple" else [root]
        writes: dict[int, float] = {}
        updated: set[str] = set()
        for index, output in enumerate(outputs):
            fraction, updates = self._updated_fraction(fused, output)
            if len(outputs) == len(root.arrays):
                writes[index] = fraction
            updated |= updates
        needed = {root.name: 1.0}
        for instruction in reversed(fused.instructions.values()):
            need = needed.get(instruction.name, 0.0)
            for index, name in enumerate(instruction.operands if need else ()):
                if instruction.opcode == "fusion":
                    inner = self.traffic(self.module.computations[instruction.names("calls")[0]])
                    part = need * inner.reads.get(index, 1.0)
                else:
                    part = need * _read_fraction(fused, instruction, index, instruction.name in updated)
                needed[name] = min(1.0, needed.get(name, 0.0) + part)
        reads = {index: needed.get(parameter.name, 0.0) for index, parameter in fused.parameters.items()}
        return Traffic(reads, writes)

    def _updated_fraction(self, fused: Computation, output: Instruction) -> tuple[float, set[str]]:
        """Fraction of an output that is written, and the instructions that update it in place."""
        fraction, updates, at = 0.0, set(), output
        while at.opcode != "parameter":
            if at.opcode in ("dynamic-update-slice", "scatter"):
                fraction += _update_fraction(fused, at)
                updates.add(at.name)
            elif at.opcode == "fusion" and len(at.arrays) == 1:
                inner = self.traffic(self.module.computations[at.names("calls")[0]])
                base = [index for index in range(len(at.operands)) if inner.reads.get(index, 1.0) == 0.0]
                if inner.writes.get(0, 1.0) == 1.0 or len(base) != 1:
                    return 1.0, set()
                fraction += inner.writes[0]
                at = fused.operand(at, base[0])
                continue
            elif at.opcode not in _TRANSPARENT:
                return 1.0, set()
            at = fused.operand(at, 0)
        return (min(1.0, fraction), updates) if fraction else (1.0, set())

    # ---- FLOPs ----

    def flops(self, computation: Computation, instruction: Instruction) -> Counter[str]:
        """FLOPs of the products in a kernel, by the kind of product."""
        if instruction.opcode == "fusion":
            inner = self.module.computations[instruction.names("calls")[0]]
            return sum((self.flops(inner, x) for x in inner.instructions.values()), Counter())
        return product_flops(computation, instruction, self.chip.platform)

    # ---- collectives ----

    def _add_fused_collectives(self, tally: _Tally, fused: Computation, channels: set[str]) -> None:
        for instruction in fused.instructions.values():
            if instruction.opcode == "fusion":
                self._add_fused_collectives(tally, self.module.computations[instruction.names("calls")[0]], channels)
            elif (kind := instruction.opcode.removesuffix("-start")) in _COLLECTIVES:
                self._add_collective(tally, fused, instruction, kind, channels)

    def _add_collective(
        self, tally: _Tally, computation: Computation, instruction: Instruction, kind: str, channels: set[str]
    ) -> None:
        channel = instruction.text(r"\bchannel_id=(\d+)")
        if channel and channel in channels:
            return
        channels.add(channel)
        arrays = [x for name in instruction.operands for x in computation.instructions[name].arrays]
        n_bytes = float(sum(x.n_bytes for x in arrays))
        size = group_size(instruction, self.n_devices)
        if kind == "all-gather":  # to each other device its own part
            n_bytes *= size - 1
        elif kind != "collective-permute":
            n_bytes *= (size - 1) / size
        if n_bytes:
            tally.add_collective(kind, 1, n_bytes)
            if self.chip.launch:
                tally.add_operation(self.label(instruction), Operation(1, seconds=self.chip.launch))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Fractions of a kernel's operands that it reads and of its results that it writes, by index; 1 where absent."""

    reads: dict[int, float]
    writes: dict[int, float]


def _traffic_of_one(computation: Computation, instruction: Instruction) -> Traffic:
    """Traffic of a kernel that is a single instruction."""
    in_place = instruction.opcode in ("dynamic-update-slice", "scatter")
    n_operands = len(instruction.operands)
    reads = {i: _read_fraction(computation, instruction, i, in_place) for i in range(n_operands)}
    if in_place:
        return Traffic(reads, {0: _update_fraction(computation, instruction)})
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return Traffic(reads, {1: 0.0, 2: 0.0})
    if instruction.opcode in ("slice-start", "dynamic-slice-start"):  # ((source), destination, context)
        source, part = (x.size for x in instruction.arrays[:2])
        return Traffic({0: min(1.0, part / source)}, {0: 0.0, 2: 0.0})
    return Traffic(reads, {})


def _read_fraction(computation: Computation, instruction: Instruction, index: int, in_place: bool) -> float:
    """Fraction of an operand that is read for all of an instruction's result."""
    if index == 0 and in_place:
        return 0.0
    if index == 0 and instruction.opcode in _SLICES:
        whole = computation.operand(instruction, 0).arrays[0].size
        return min(1.0, instruction.arrays[0].size / max(1, whole))
    return 1.0


def _update_fraction(computation: Computation, instruction: Instruction) -> float:
    """Fraction of its result that an update in place writes."""
    update = computation.operand(instruction, 1 if instruction.opcode == "dynamic-update-slice" else 2)
    return min(1.0, update.arrays[0].size / max(1, instruction.arrays[0].size))


def group_size(instruction: Instruction, n_devices: int) -> int:
    """Number of devices that exchange data in a collective: of its first group. Raises ValueError."""
    text = instruction.attributes
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])  # a part of an axis: 'a':(2)4
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(found[1].split(","))
    if "replica_groups=" not in text or "replica_groups={}" in text:
        return n_devices
    raise ValueError(f"the groups of a collective are written in an unknown form: {text[:200]}")


# ---- names ---------------------------------------------------------------------------------------

_NOISE = re.compile(
    r"(while|body|cond|closed_call|checkpoint|shard_map|rematted_computation|branch_\d+_fun|.*_scan_layers|"
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
