"""Deliberately broken versions of the package, for `tests/mutants.py`."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is wrong with it.
        where: the file or folder to change, relative to the root. Nothing is built, so of csrc only headers
            that tests compile can be broken.
        old: the text to replace, which must occur exactly once.
        new: the replacement.
        tests: paths or pytest node ids, separated by spaces. At least one must fail. "-k" and a part of a
            name may follow.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


def read_mutants(text: str) -> tuple[Mutant, ...]:
    """Read mutants that are written like a diff.

    Each mutant begins with "# name" and "where: tests". Lines that begin with "-" are replaced with lines
    that begin with "+". Lines that begin with " " are in both texts. A text may be a part of a line. If all
    lines begin with "-", whole lines are removed.
    """
    found = []
    for block in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        name, *lines = block.rstrip("\n").split("\n")
        first = next(number for number, line in enumerate(lines) if line[0] in "-+ ")
        where, tests = " ".join(lines[:first]).split(": ", 1)
        old = "\n".join(line[1:] for line in lines[first:] if line[0] != "+")
        new = "\n".join(line[1:] for line in lines[first:] if line[0] != "-")
        whole_lines = all(line[0] == "-" for line in lines[first:])
        found.append(Mutant(name, where, f"{old}\n" if whole_lines else old, new, tests))
    return tuple(found)
