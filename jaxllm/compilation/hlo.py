"""What a compiled program does, read from the text of its optimised HLO.

A loop's body is written once and runs many times: everything here is multiplied by the trip counts
of the loops around it, where the text gives them (`known_trip_count`, or a condition that compares
a counter with one constant).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_BITS = {"pred": 8, "token": 0, "bf16": 16, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|token|bf16|[a-z]\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: name, type of the result, operation, and the text behind its bracket."""

    name: str
    type: str
    opcode: str
    rest: str

    def operands(self) -> list[str]:
        """Names of the operands; "name#2" is an element of a tuple."""
        return re.findall(r"%([\w.\-]+(?:#\d+)*)", self.rest.partition(")")[0])

    def attribute(self, name: str) -> str | None:
        """The computation or word after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and which of them runs first."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the text.

    Attributes:
      kind: one of COLLECTIVES.
      runs: how often it runs in a step.
      bytes: of the whole array: the gathered result, the operand of a reduction.
      group: devices that take part together.
    """

    kind: str
    runs: int
    bytes: int
    group: int

    @property
    def sent_bytes(self) -> float:
        """What a device sends in one run, by the ring algorithms."""
        others = (self.group - 1) / self.group
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        return self.bytes * others * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Summary:
    """A program's work in one step, on one device.

    Attributes:
      collectives: all of them.
      flops: operations of matrix products and convolutions.
      cycles: the sum of what the compiler estimates for its instructions; 0 if it gives none.
      unknown_loops: loops whose trip count cannot be read; their bodies count once.
    """

    collectives: tuple[Collective, ...]
    flops: float
    cycles: float
    unknown_loops: int

    def by_kind(self) -> dict[str, dict[str, float]]:
        """{kind: {count, bytes, sent_bytes}}, summed over the step."""
        table: dict[str, dict[str, float]] = {}
        for item in self.collectives:
            row = table.setdefault(item.kind, {"count": 0, "bytes": 0, "sent_bytes": 0.0})
            row["count"] += item.runs
            row["bytes"] += item.runs * item.bytes
            row["sent_bytes"] += item.runs * item.sent_bytes
        return dict(sorted(table.items()))


def parse(text: str) -> Program:
    """Reads the text of an HLO module.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    lines: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, lines = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
        elif found := _INSTRUCTION.match(line):
            if instruction := _instruction(*found.groups()):
                lines.append(instruction)
    if entry not in computations:
        raise ValueError("the text holds no HLO entry computation.")
    return Program(computations, entry)


def summarize(program: Program) -> Summary:
    """Walks the program from its entry, into loops, branches, calls and fusions.

    Of a branch all arms count. The compiler of a TPU writes an asynchronous collective as several
    fusions with one channel; they count once.
    """
    collectives: list[Collective] = []
    totals = {"flops": 0.0, "cycles": 0.0}
    unknown: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def visit(name: str, runs: int, frame: str) -> None:
        types = {item.name: item.type for item in program.computations.get(name, ())}
        for item in program.computations.get(name, ()):
            totals["flops"] += runs * _flops(item, types)
            if name == frame:
                found = re.search(r'"estimated_cycles":"(\d+)"', item.rest)
                totals["cycles"] += runs * int(found.group(1)) if found else 0
            if collective := _collective(item, name, runs):
                channel = re.search(r"channel_id=(\d+)", item.rest)
                key = (frame, channel.group(1) if channel else item.name)
                if key not in seen:
                    seen.add(key)
                    collectives.append(collective)
            if item.opcode.endswith(("-done", "-update")):
                continue
            trips = 1
            if item.opcode == "while":
                count = trip_count(program, item)
                if count is None:
                    unknown.add(item.name)
                trips = 1 if count is None else count
            for called in _called(item):
                inside = frame if item.opcode == "fusion" else called
                visit(called, runs * trips, inside)

    visit(program.entry, 1, program.entry)
    return Summary(tuple(collectives), totals["flops"], totals["cycles"], len(unknown))


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often a `while` runs its body; None where the text does not say.

    Without `known_trip_count` the condition must be one comparison of an element of the loop's
    tuple with a constant, and the body must add a constant to that element (a TPU's compiler
    unrolls some loops, and counts them in twos). The count starts at 0.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known.group(1))
    lines = list(_with_called(program, loop.attribute("condition") or ""))
    compares = [item for item in lines if item.opcode == "compare"]
    limits = [item for item in lines if item.opcode == "constant"]
    if not len(compares) == len(limits) == 1 or "direction=LT" not in compares[0].rest:
        return None
    limit, index = _constant(limits[0]), _tuple_index(compares[0], lines)
    step = None if index is None else _step(program, loop, index)
    return None if limit is None or not step else -(-limit // step)


def _tuple_index(compare: Instruction, lines: list[Instruction]) -> int | None:
    """Which element of a loop's tuple the condition compares: by instruction or by "name#2"."""
    found = [name.partition("#")[2] for name in compare.operands() if "#" in name]
    for item in lines:
        if item.opcode == "get-tuple-element" and not found:
            found += re.findall(r"index=(\d+)", item.rest)
    return int(found[0]) if len(found) == 1 and found[0].isdigit() else None


def _step(program: Program, loop: Instruction, index: int) -> int | None:
    """What a loop's body adds to an element of its tuple."""
    body = program.computations.get(loop.attribute("body") or "", ())
    names = {item.name: item for item in body}
    results = body[-1].operands() if body else []
    added = names.get(results[index]) if len(results) > index else None
    if added is None or added.opcode != "add":
        return None
    steps = [_constant(names[name]) for name in added.operands() if name in names]
    steps = [step for step in steps if step is not None]
    return steps[0] if len(steps) == 1 else None


def _constant(item: Instruction) -> int | None:
    value = re.match(r"(\d+)\)", item.rest) if item.opcode == "constant" else None
    return int(value.group(1)) if value else None


def array_bytes(text: str) -> int:
    """Bytes of all arrays of a type, "bf16[2,3]{1,0}" or a tuple of such."""
    return sum(
        math.prod(_dims(dims)) * _bits(kind) // 8 for kind, dims in _ARRAY.findall(text) if kind
    )


def _instruction(name: str, body: str) -> Instruction | None:
    if body.startswith("("):
        end = _closing_bracket(body)
        kind, rest = body[: end + 1], body[end + 2 :]
    else:
        kind, _, rest = body.partition(" ")
    opcode, bracket, rest = rest.partition("(")
    return Instruction(name, kind, opcode.strip(), rest) if bracket else None


def _closing_bracket(text: str) -> int:
    """Index of the bracket that closes the one at the start."""
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index
    raise ValueError(f"a bracket is not closed in HLO text: {text[:80]!r}.")


def _called(item: Instruction) -> Iterator[str]:
    """Computations that an instruction runs; not those that combine two elements."""
    for kind, name in _CALLED.findall(item.rest):
        if kind != "to_apply" or item.opcode == "call":
            yield name
    for names in _BRANCHES.findall(item.rest):
        yield from re.findall(r"[\w.\-]+", names)


def _with_called(program: Program, name: str) -> Iterator[Instruction]:
    for item in program.computations.get(name, ()):
        yield item
        for called in _called(item):
            yield from _with_called(program, called)


def _collective(item: Instruction, computation: str, runs: int) -> Collective | None:
    kind = item.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    group = _group_size(item.rest)
    size = array_bytes(_result_type(item, kind))
    if kind == "reduce-scatter":
        size *= group
    elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        # A TPU's fusion of the reduction and the slice that a device keeps.
        kind = "reduce-scatter"
    return Collective(kind, runs, size, group)


def _result_type(item: Instruction, kind: str) -> str:
    """The type of the result; an asynchronous start also names its operands, before it."""
    if item.opcode == kind or kind == "all-reduce":
        return item.type
    parts = _elements(item.type)
    return parts[1] if len(parts) > 1 else item.type


def _elements(text: str) -> list[str]:
    """The types in a tuple's type; none of an array's."""
    parts, depth, start = [], 0, 1
    for index, character in enumerate(text if text.startswith("(") else ""):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if (character == "," and depth == 1) or depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return parts


def _operand_type(name: str, types: dict[str, str]) -> str:
    """The type of an operand, or of an element of one ("name#2")."""
    base, *indices = name.split("#")
    found = types.get(base, "")
    for index in indices:
        elements = _elements(found)
        found = elements[int(index)] if len(elements) > int(index) else ""
    return found


def _group_size(rest: str) -> int:
    """Devices of one replica group, in any of the forms that HLO is printed in."""
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found.group(2))
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return found.group(1).count(",") + 1
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found.group(2))
        return math.prod(int(part) if part else sizes[name] for name, part in used)
    return 2


def _flops(item: Instruction, types: dict[str, str]) -> float:
    """Operations of a `dot`, a `convolution` or a call of a GPU's matrix library."""
    if item.opcode not in ("dot", "convolution", "custom-call"):
        return 0.0
    shapes = [_shape(_operand_type(name, types)) for name in item.operands()[:2]]
    if item.opcode == "convolution":
        return _convolution_flops(_shape(item.type), shapes, item.rest)
    if item.opcode == "custom-call" and "$matmul" not in item.rest and "$gemm" not in item.rest:
        return 0.0
    contracting = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', item.rest)
    if not contracting or not shapes or not shapes[0]:
        return 0.0
    sizes = [shapes[0][int(d)] for d in re.findall(r"\d+", contracting.group(1))]
    return 2.0 * math.prod(_shape(item.type)) * math.prod(sizes)


def _convolution_flops(out: list[int], shapes: list[list[int]], rest: str) -> float:
    """Two operations for each product of a kernel's element with one that is not padding.

    A TPU's matrix products are convolutions whose batch dimensions are spatial ones, dilated so
    that every window holds one element.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if not labels or len(shapes) < 2 or not all(shapes):
        return 0.0
    left, right, result = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(f.split("=") for f in window.group(1).split()) if window else {}
    total = 2.0 * out[result.index("b")] * out[result.index("f")] * shapes[1][right.index("i")]
    for axis in range(len(left) - 2):

        def value(name: str, default: int, axis: int = axis) -> int:
            return int(fields[name].split("x")[axis]) if name in fields else default

        label = str(axis)
        low = int(fields["pad"].split("x")[axis].split("_")[0]) if "pad" in fields else 0
        base = value("lhs_dilate", 1)
        positions = np.arange(out[result.index(label)])[:, None] * value("stride", 1)
        offsets = np.arange(value("size", 1))[None] * value("rhs_dilate", 1)
        index = positions + offsets - low
        inside = (index >= 0) & (index % base == 0) & (index // base < shapes[0][left.index(label)])
        total *= int(inside.sum())
    return total


def _shape(text: str) -> list[int]:
    """Dimensions of the first array of a type."""
    found = _ARRAY.search(text)
    return _dims(found.group(2)) if found else []


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    return int(re.search(r"\d+", kind).group())
