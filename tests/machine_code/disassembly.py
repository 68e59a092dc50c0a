"""Reads the output of `cuobjdump --dump-sass`: instructions, loops, memory accesses and loads in flight."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence

FUNCTION = re.compile(r"^\s+Function : (\S+)")
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"(?<![\w\[])-?\|?~?!?(R\d+)\b|\[(R\d+)")
#: The number of bits of a memory access. An instruction without a width accesses 32 bits.
WIDTH = re.compile(r"\.(?:[US])?(8|16|64|128|256)\b")
#: Instructions that end a thread if they have no predicate.
ENDS = ("EXIT", "RET", "KILL")
#: Jumps to computed addresses. The loop analysis does not support code that contains one.
UNKNOWN_JUMPS = ("BRX", "JMX", "JMP", "BRXU", "JMXU")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One SASS instruction: its address in the function, and its name with suffixes, such as `LDG.E.128`.

    `predicate`: the predicate register that guards it, or "". `operands`: the text after the name.
    """

    address: int
    predicate: str
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bytes(self) -> int:
        """The number of bytes per thread of a memory access."""
        width = WIDTH.search(self.name)
        return int(width[1]) // 8 if width else 4

    @property
    def target(self) -> int | None:
        """The address that a jump goes to, or None."""
        return int(self.operands.rpartition(" ")[2], 16) if self.kind == "BRA" else None

    @property
    def always_jumps(self) -> bool:
        """Whether this is a jump that every thread takes."""
        return self.name == "BRA" and not self.predicate and "," not in self.operands

    @property
    def results(self) -> tuple[str, ...]:
        """The registers that a load writes."""
        first = re.match(r"(?:U?P\w+, )*R(\d+)", self.operands)
        if first is None:
            return ()
        start = int(first[1])
        return tuple(f"R{start + i}" for i in range(max(self.bytes // 4, 1)))

    @property
    def registers(self) -> frozenset[str]:
        """The registers in the operands, including results. Of a pair, only the first."""
        return frozenset(a or b for a, b in REGISTER.findall(self.operands))


def functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield each function's name and instructions, without the padding at its end.

    Raises ValueError if a line of the output of `cuobjdump --dump-sass` is not a known instruction.
    """
    name = ""
    found = []
    for line in text.splitlines():
        if (match := FUNCTION.match(line)) is not None:
            if name:
                yield name, without_padding(found)
            name = match[1]
            found = []
        elif line.lstrip().startswith("/*") and ";" in line:
            match = LINE.match(line)
            if match is None:
                raise ValueError(f"not an instruction: {line.strip()}")
            found.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
    if name:
        yield name, without_padding(found)


def without_padding(code: list[Instruction]) -> list[Instruction]:
    """Remove the jump to itself and the NOPs after the last instruction."""
    end = len(code)
    while end and (code[end - 1].name == "NOP" or code[end - 1].target == code[end - 1].address):
        end -= 1
    return code[:end]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions in the order of their addresses, with the branches inside it."""

    body: tuple[Instruction, ...]

    def accesses(self, *kinds: str) -> list[Instruction]:
        return [instruction for instruction in self.body if instruction.kind in kinds]

    @property
    def loaded(self) -> int:
        """Bytes that one thread loads from global memory per iteration."""
        return sum(instruction.bytes for instruction in self.accesses("LDG"))

    @property
    def stored(self) -> int:
        return sum(instruction.bytes for instruction in self.accesses("STG"))

    @property
    def loads_in_flight(self) -> list[Instruction]:
        """The longest sequence of loads from global memory before a loaded value is used.

        The search covers two iterations, because a load may be issued one iteration before its value is used.
        """
        most: list[Instruction] = []
        pending: list[Instruction] = []
        for instruction in self.body * 2:
            waiting = {register for load in pending for register in load.results}
            if waiting & instruction.registers:
                pending = []
            if instruction.kind == "LDG":
                pending.append(instruction)
                most = max(most, list(pending), key=len)
        return most

    @property
    def instructions(self) -> Counter[str]:
        """The number of occurrences of each instruction, by its name with suffixes. NOPs count too."""
        return Counter(instruction.name for instruction in self.body)


def blocks(code: Sequence[Instruction]) -> tuple[list[range], list[set[int]]]:
    """Return the basic blocks as ranges of indices into `code`, and the successors of each block.

    Raises ValueError if the code has a jump to a computed address.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    starts = {0}
    for i, instruction in enumerate(code):
        if instruction.kind in UNKNOWN_JUMPS:
            raise ValueError(
                f"a jump to an address that is computed: {instruction.name} {instruction.operands}"
            )
        if instruction.target is not None:
            starts |= {i + 1} | ({index[instruction.target]} if instruction.target in index else set())
        elif instruction.kind in ENDS:
            starts.add(i + 1)
    ordered = sorted(start for start in starts if start < len(code))
    ranges = [range(a, b) for a, b in zip(ordered, [*ordered[1:], len(code)], strict=True)]
    number = {span.start: i for i, span in enumerate(ranges)}
    successors = []
    for i, block in enumerate(ranges):
        last = code[block[-1]]
        after = set()
        if last.target in index:
            after.add(number[index[last.target]])
        ends = last.kind in ENDS and not last.predicate
        if not ends and not last.always_jumps and i + 1 < len(ranges):
            after.add(i + 1)
        successors.append(after)
    return ranges, successors


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """Return the innermost loops, in the order of their addresses.

    A loop is a natural loop: its head dominates the block that jumps back to it. The loop contains the head
    and all blocks that reach that jump without passing through the head.
    """
    ranges, successors = blocks(code)
    count = len(ranges)
    before: list[set[int]] = [set() for _ in ranges]
    for i, after in enumerate(successors):
        for other in after:
            before[other].add(i)
    everything = (1 << count) - 1
    dominators = [1] + [everything] * (count - 1)
    changed = True
    while changed:
        changed = False
        for i in range(1, count):
            common = everything
            for other in before[i]:
                common &= dominators[other]
            if common | 1 << i != dominators[i]:
                dominators[i] = common | 1 << i
                changed = True
    bodies: dict[int, set[int]] = {}
    for i, after in enumerate(successors):
        for head in after:
            # Skip unreachable blocks: every block dominates them.
            if dominators[i] >> head & 1 and (before[head] or head == 0) and dominators[i] != everything:
                body = bodies.setdefault(head, {head})
                left = [i]
                while left:
                    block = left.pop()
                    if block not in body:
                        body.add(block)
                        left += before[block]
    innermost = [body for head, body in bodies.items() if not (bodies.keys() - {head}) & body]
    return [
        Loop(tuple(code[i] for block in sorted(body) for i in ranges[block]))
        for body in sorted(innermost, key=min)
    ]
