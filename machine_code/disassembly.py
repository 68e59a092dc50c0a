"""Reads `cuobjdump --dump-sass`: instructions, loops, accesses to memory, loads in flight."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence

FUNCTION = re.compile(r"^\s+Function : (\S+)")
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"(?<![\w\[])-?\|?~?!?(R\d+)\b|\[(R\d+)")
#: Bits of an access to memory whose name has no width: 32.
WIDTH = re.compile(r"\.(?:[US])?(8|16|64|128|256)\b")
#: These end a thread's way through the code, if they have no predicate.
ENDS = ("EXIT", "RET", "KILL")
#: Jumps to addresses that are computed: loops could not be found.
UNKNOWN_JUMPS = ("BRX", "JMX", "JMP", "BRXU", "JMXU")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`predicate`: the one that it needs, or ""; `name`: with its suffixes, such as `LDG.E.128`."""

    address: int
    predicate: str
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Of an access to memory, for each thread."""
        width = WIDTH.search(self.name)
        return int(width[1]) // 8 if width else 4

    @property
    def target(self) -> int | None:
        """Where it jumps to."""
        if self.kind != "BRA":
            return None
        return int(self.operands.rpartition(" ")[2], 16)

    @property
    def always_jumps(self) -> bool:
        """Whether no thread goes on behind a jump."""
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
        """The registers that it names, as results too. Of a pair, the first."""
        return frozenset(a or b for a, b in REGISTER.findall(self.operands))


def functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Each function's name and instructions, without the padding at its end.

    Raises:
        ValueError: a line is no known instruction.
    """
    name, found = "", []
    for line in text.splitlines():
        if (match := FUNCTION.match(line)) is not None:
            if name:
                yield name, without_padding(found)
            name, found = match[1], []
        elif line.lstrip().startswith("/*") and ";" in line:
            match = LINE.match(line)
            if match is None:
                raise ValueError(f"not an instruction: {line.strip()}")
            found.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
    if name:
        yield name, without_padding(found)


def without_padding(code: list[Instruction]) -> list[Instruction]:
    """Without the jump to itself and the NOPs behind the last instruction."""
    end = len(code)
    while end and (code[end - 1].name == "NOP" or code[end - 1].target == code[end - 1].address):
        end -= 1
    return code[:end]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop. `body`: its instructions by address, inner branches included."""

    body: tuple[Instruction, ...]

    def accesses(self, *kinds: str) -> list[Instruction]:
        return [each for each in self.body if each.kind in kinds]

    @property
    def loaded(self) -> int:
        """Bytes that one round of one thread loads from global memory."""
        return sum(each.bytes for each in self.accesses("LDG"))

    @property
    def stored(self) -> int:
        return sum(each.bytes for each in self.accesses("STG"))

    @property
    def loads_in_flight(self) -> list[Instruction]:
        """The most loads from global memory that are issued one after another, with no use of a loaded value.

        Two rounds are looked at: loads may be issued a round before their values are used.
        """
        most: list[Instruction] = []
        pending: list[Instruction] = []
        for each in self.body * 2:
            waiting = {register for load in pending for register in load.results}
            if waiting & each.registers:
                pending = []
            if each.kind == "LDG":
                pending.append(each)
                most = max(most, list(pending), key=len)
        return most

    @property
    def instructions(self) -> Counter[str]:
        """How often each instruction stands in it, by its name with suffixes. A NOP takes its turn too."""
        return Counter(each.name for each in self.body)


def blocks(code: Sequence[Instruction]) -> tuple[list[range], list[set[int]]]:
    """Basic blocks, as ranges of indices, and each one's successors."""
    index = {each.address: i for i, each in enumerate(code)}
    starts = {0}
    for i, each in enumerate(code):
        if each.kind in UNKNOWN_JUMPS:
            raise ValueError(f"a jump to an address that is computed: {each.name} {each.operands}")
        if each.target is not None:
            starts |= {i + 1} | ({index[each.target]} if each.target in index else set())
        elif each.kind in ENDS:
            starts.add(i + 1)
    ordered = sorted(start for start in starts if start < len(code))
    ranges = [range(a, b) for a, b in zip(ordered, [*ordered[1:], len(code)], strict=True)]
    number = {each.start: i for i, each in enumerate(ranges)}
    successors = []
    for i, block in enumerate(ranges):
        last, after = code[block[-1]], set()
        if last.target in index:
            after.add(number[index[last.target]])
        ends = last.kind in ENDS and not last.predicate
        if not ends and not last.always_jumps and i + 1 < len(ranges):
            after.add(i + 1)
        successors.append(after)
    return ranges, successors


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """The innermost loops, in the order of their addresses.

    A loop is what can reach a jump back to an instruction through which all ways to that jump go.
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
                dominators[i], changed = common | 1 << i, True
    bodies: dict[int, set[int]] = {}
    for i, after in enumerate(successors):
        for head in after:
            # What nothing reaches is dominated by everything.
            if dominators[i] >> head & 1 and (before[head] or head == 0) and dominators[i] != everything:
                body, left = bodies.setdefault(head, {head}), [i]
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
