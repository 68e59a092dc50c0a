"""What a deliberately broken version of the package is, for `tests/mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is wrong with it.
        where: a file, or a folder in whose files, from the root. Nothing is built: of csrc only headers that
            tests compile can be broken.
        old, new: the text replaced, which stands there once, and what it becomes.
        tests: paths, or tests as pytest names them, of which one at least must fail; apart by blanks.
            "-k" and a part of a name may follow.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str
