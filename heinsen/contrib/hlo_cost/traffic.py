"""Bytes that a kernel of a compiled program reads and writes in main memory."""

import dataclasses

from heinsen.contrib.hlo_cost.hlo import Computation, Instruction, Module

_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place, and the index of the operand that is written
_TRANSPARENT = {"bitcast", "reshape", "copy", "convert"}  # between an update in place and the result


def moved_bytes(module: Module, computation: Computation, kernel: Instruction) -> float:
    """Bytes of the operands that a kernel reads, each once, and of the results that it writes."""
    traffic = _find_traffic(module, computation, kernel)
    reads: dict[str, float] = {}  # an operand that is given twice is read once
    for index, name in enumerate(kernel.operands):
        reads[name] = max(reads.get(name, 0.0), traffic.reads.get(index, 1.0))
    total = 0.0
    for name, fraction in reads.items():
        total += fraction * sum(x.main_memory_bytes for x in computation.instructions[name].arrays)
    for index, array in enumerate(kernel.arrays):
        total += traffic.writes.get(index, 1.0) * array.main_memory_bytes
    return total


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """Fractions of a kernel's operands that it reads and of its results that it writes, by index; 1 where absent."""

    reads: dict[int, float]
    writes: dict[int, float]


def _find_traffic(module: Module, computation: Computation, kernel: Instruction) -> _Traffic:
    if kernel.opcode == "fusion":
        return _traffic_of_fusion(module, module.called(kernel, "calls")[0])
    if kernel.opcode == "fusion-start":  # ((operands), results, context)
        traffic = _traffic_of_fusion(module, module.called(kernel, "calls")[0])
        first = sum(len(computation.instructions[name].arrays) for name in kernel.operands)
        written = [*[0.0] * first, *(traffic.writes.get(i, 1.0) for i in range(len(kernel.arrays) - first - 1)), 0.0]
        return _Traffic(traffic.reads, dict(enumerate(written)))
    reads = {i: _read_fraction(computation, kernel, i, kernel.opcode in _UPDATES) for i in range(len(kernel.operands))}
    if kernel.opcode in _UPDATES:
        return _Traffic(reads, {0: _update_fraction(computation, kernel)})
    if kernel.opcode == "copy-start":  # (destination, source, context)
        return _Traffic(reads, {1: 0.0, 2: 0.0})
    if kernel.opcode in ("slice-start", "dynamic-slice-start"):  # ((source), destination, context)
        source, part = (x.size for x in kernel.arrays[:2])
        return _Traffic({0: min(1.0, part / source)}, {0: 0.0, 2: 0.0})
    return _Traffic(reads, {})


def _traffic_of_fusion(module: Module, fused: Computation) -> _Traffic:
    """Bytes of its parameters that a fused computation reads, and of its results that it writes."""
    root = fused.root
    outputs = [fused.instructions[x] for x in root.operands] if root.opcode == "tuple" else [root]
    writes: dict[int, float] = {}
    updates: set[str] = set()
    for index, output in enumerate(outputs):
        fraction, found = _written_fraction(module, fused, output)
        updates |= found
        if len(outputs) == len(root.arrays):
            writes[index] = fraction
    needed = {root.name: 1.0}  # fractions of the instructions' results, from the last to the first
    for instruction in reversed(fused.instructions.values()):
        need = needed.get(instruction.name, 0.0)
        if not need:
            continue
        inner = _find_traffic(module, fused, instruction) if instruction.opcode == "fusion" else None
        for index, name in enumerate(instruction.operands):
            if inner is not None:
                part = inner.reads[index]
            else:
                part = _read_fraction(fused, instruction, index, instruction.name in updates)
            needed[name] = min(1.0, needed.get(name, 0.0) + need * part)
    return _Traffic({index: needed.get(x.name, 0.0) for index, x in fused.parameters.items()}, writes)


def _written_fraction(module: Module, fused: Computation, output: Instruction) -> tuple[float, set[str]]:
    """Fraction of an output that is written, and the names of the instructions that update it in place."""
    fraction, updates, at = 0.0, set(), output
    while at.opcode != "parameter":
        base = 0  # the operand that is updated
        if at.opcode in _UPDATES:
            fraction += _update_fraction(fused, at)
            updates.add(at.name)
        elif at.opcode == "fusion" and len(at.arrays) == 1:
            inner = _find_traffic(module, fused, at)
            unread = [index for index in range(len(at.operands)) if inner.reads[index] == 0.0]
            if inner.writes[0] == 1.0 or len(unread) != 1:
                return 1.0, set()
            fraction += inner.writes[0]
            base = unread[0]
        elif at.opcode not in _TRANSPARENT:
            return 1.0, set()
        at = fused.operand(at, base)
    return (min(1.0, fraction), updates) if fraction else (1.0, set())


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
    update = computation.operand(instruction, _UPDATES[instruction.opcode])
    return min(1.0, update.arrays[0].size / max(1, instruction.arrays[0].size))
