"""Computations and instructions of the optimized HLO text of a compiled program.

Only what costs are counted from: the arrays that an instruction makes, with their layouts, its operands, and its
attributes as text.
"""

import dataclasses
import functools
import math
import re

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
_BYTES |= {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}  # f8e4m3 and its like have one byte
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")  # dtype, shape, order, layout


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type and layout of an array.

    Attributes:
      minor_to_major: its axes, that of adjacent elements first.
      tile: the tile that the minor axes are padded to, major axis first (TPUs); empty: they are not.
      memory_space: 0 is the device's main memory; on TPUs others are on the chip.
    """

    dtype: str
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Its bytes in memory, with padding."""
        order = self.minor_to_major or tuple(reversed(range(len(self.shape))))
        sizes = [self.shape[axis] for axis in reversed(order)]  # major axis first
        for i, part in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ()), start=1):
            sizes[-i] = -(-sizes[-i] // part) * part
        return math.ceil(math.prod(sizes) * _BYTES.get(self.dtype, 1))

    @property
    def main_memory_bytes(self) -> int:
        """Its bytes if it is in the main memory, 0 if it is on the chip."""
        return self.n_bytes if self.memory_space == 0 else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `arrays` are the leaves of its result, `attributes` the text after its operands."""

    name: str
    opcode: str
    arrays: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def names(self, key: str) -> list[str]:
        """Computations that an attribute names: to_apply=%a, or branch_computations={%a, %b}; [] without it."""
        match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
        return [] if match is None else [x.strip().lstrip("%") for x in (match[1] or match[2]).split(",")]

    def numbers(self, key: str) -> tuple[int, ...]:
        """An attribute of numbers in braces: dimensions={0,1}; () without it."""
        match = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return () if match is None or not match[1] else tuple(map(int, match[1].split(",")))

    def text(self, pattern: str) -> str:
        """The first group of a pattern in the attributes; "" without it."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def op_name(self) -> str:
        """The path of JAX's names: jit(step)/jvp(Model)/layers/dot_general."""
        return self.text(r'\bop_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions in order, of which the last to be marked ROOT is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.literal): x for x in self.instructions.values() if x.opcode == "parameter"}

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program. sources: "file.py:line" of each stack frame's innermost call."""

    computations: dict[str, Computation]
    entry: Computation
    sources: dict[int, str]

    def called(self, instruction: Instruction, *keys: str) -> list[Computation]:
        """The computations that an instruction's attributes name."""
        return [self.computations[name] for key in keys for name in instruction.names(key)]

    def source(self, instruction: Instruction) -> str:
        """The line of Python that made an instruction, as "file.py:line"; "" if it is not known."""
        frame = instruction.text(r"\bstack_frame_id=(\d+)")
        if frame:
            return self.sources.get(int(frame), "")
        file, line = instruction.text(r'\bsource_file="([^"]*)"'), instruction.text(r"\bsource_line=(\d+)")
        return f"{file.rsplit('/', 1)[-1]}:{line}" if file else ""


def parse_module(text: str) -> Module:
    """Parse `compiled.as_text()`. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    entry = name = root = None
    for line in text.splitlines():
        if name is None:
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$", line):
                name, instructions, root = header[2], {}, None
                entry = name if header[1] else entry
        elif line.startswith("}"):
            if root is None:
                raise ValueError(f"the computation {name} has no root")
            computations[name] = Computation(name, instructions, root)
            name = None
        elif line.strip():
            instruction = parse_instruction(line)
            instructions[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                root = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation")
    return Module(computations, computations[entry], _parse_sources(text))


def parse_instruction(line: str) -> Instruction:
    """Parse one line: `%name = type opcode(operands), attributes`. Raises ValueError."""
    match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        raise ValueError(f"not an instruction of HLO: {line.strip()[:200]}")
    start = match.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    inside = line[opening + 1 : closing]
    opcode = line[end:opening].strip()
    operands = () if opcode in ("parameter", "constant", "iota") else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(match[1], opcode, parse_arrays(line[start:end]), operands, inside, line[closing + 1 :])


def parse_arrays(text: str) -> tuple[ArrayType, ...]:
    """Parse a type, `f32[8,128]{1,0:T(8,128)S(1)}` or a tuple of such, to the arrays in it."""
    numbers = lambda text: tuple(int(x) for x in text.replace("<=", "").split(",") if x)
    arrays = []
    for dtype, shape, order, layout in _ARRAY.findall(text):
        tile, space = re.search(r"T\(([\d,]*)\)", layout), re.search(r"S\((\d+)\)", layout)
        padding = numbers(tile[1]) if tile else ()
        arrays.append(ArrayType(dtype, numbers(shape), numbers(order), padding, int(space[1]) if space else 0))
    return tuple(arrays)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    raise ValueError(f"unbalanced parentheses: {text.strip()[:200]}")


def _parse_sources(text: str) -> dict[int, str]:
    """Read the tables FileNames, FileLocations and StackFrames, where the text has them."""

    def table(title: str) -> dict[int, str]:
        match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
        return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1] for line in match[1].splitlines()} if match else {}

    def field(entry: str, name: str) -> int:
        match = re.search(rf"\b{name}=(\d+)", entry)
        return int(match[1]) if match else 0

    files, locations = table("FileNames"), table("FileLocations")
    sources = {}
    for frame, entry in table("StackFrames").items():
        location = locations.get(field(entry, "file_location_id"), "")
        path = files.get(field(location, "file_name_id"), "").strip('"')
        if path:
            sources[frame] = f"{path.rsplit('/', 1)[-1]}:{field(location, 'line')}"
    return sources
