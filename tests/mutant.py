"""Deliberately broken versions of the package, for `tests/mutants.py`."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is wrong with it.
        where: the file or folder to change, relative to the root. Of csrc, only csrc/autograd is compiled
            again, so elsewhere in it only headers that tests compile can be broken.
        old: the text to replace, which must occur exactly once.
        new: the replacement.
        tests: paths or pytest node ids, separated by spaces. At least one must fail. "-k" and a part of a
            name may follow.
        ptx: on the emulated GPU, whether to run the kernels as nvcc's PTX.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str
    ptx: bool = False


def read_mutants(text: str) -> tuple[Mutant, ...]:
    """Read mutants that are written like a diff.

    A line "where: tests" holds for all mutants below it, up to the next such line. Each mutant begins with
    "# name". Lines that begin with "-" are replaced with lines that begin with "+". Lines that begin with " "
    are in both texts. A text may be a part of a line. If all lines begin with "-", whole lines are removed.
    """
    found = []
    parts = re.split(r"^((?:\w.*\n)+)", text, flags=re.MULTILINE)[1:]
    for header, mutants in zip(parts[::2], parts[1::2], strict=True):
        where, tests = " ".join(header.split()).split(": ", 1)
        for block in re.split(r"^# ", mutants, flags=re.MULTILINE)[1:]:
            name, *lines = block.rstrip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if line[0] != "+")
            new = "\n".join(line[1:] for line in lines if line[0] != "-")
            whole_lines = all(line[0] == "-" for line in lines)
            found.append(Mutant(name, where, f"{old}\n" if whole_lines else old, new, tests))
    return tuple(found)
