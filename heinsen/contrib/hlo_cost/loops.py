"""How often a loop of a compiled program runs."""

import re

from heinsen.contrib.hlo_cost.hlo import Computation, Instruction, Module


def find_trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop runs: as XLA states it, or of a counter from a constant to a constant; None: data decide."""
    stated = loop.text(r'"known_trip_count":\{"n":"(\d+)"')
    if stated:
        return int(stated)
    condition, body = module.called(loop, "condition", "body")
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    start_of = lambda element: _constant(computation, _tuple_element(computation, loop.operands[0], element))
    counter = _element_of_parameter(condition, test.operands[0])
    if counter is None or (start := start_of(counter)) is None:
        return None
    stop = _constant(condition, test.operands[1])
    if stop is None:
        limit = _element_of_parameter(condition, test.operands[1])
        if limit is None or _element_of_parameter(body, _tuple_element(body, body.root.name, limit)) != limit:
            return None
        stop = start_of(limit)
    following = _skip_copies(body, _tuple_element(body, body.root.name, counter))
    if stop is None or following is None or following.opcode != "add":
        return None
    for before, by in (following.operands, following.operands[::-1]):
        step = _constant(body, by)
        if _element_of_parameter(body, before) == counter and step:
            return max(0, -(-(stop - start) // step))
    return None


def _skip_copies(computation: Computation, name: str | None) -> Instruction | None:
    instruction = computation.instructions[name] if name else None
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "copy-start", "copy-done", "convert"):
        instruction = computation.operand(instruction, 0)
    return instruction


def _constant(computation: Computation, name: str | None) -> int | None:
    found = _skip_copies(computation, name)
    is_integer = found is not None and found.opcode == "constant" and re.fullmatch(r"-?\d+", found.literal)
    return int(found.literal) if found is not None and is_integer else None


def _tuple_element(computation: Computation, name: str, index: int) -> str | None:
    found = _skip_copies(computation, name)
    return found.operands[index] if found is not None and found.opcode == "tuple" else None


def _element_of_parameter(computation: Computation, name: str | None) -> int | None:
    """Index of the element of the computation's parameter that an instruction is; None: it is no such."""
    found = _skip_copies(computation, name)
    if found is None or found.opcode != "get-tuple-element":
        return None
    is_parameter = computation.operand(found, 0).opcode == "parameter"
    return int(found.text(r"\bindex=(\d+)")) if is_parameter else None
