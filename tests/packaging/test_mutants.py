"""The mutants of `make test-mutants` and the other targets can be made, and their tests exist."""

import mutants
import sanitized
from emulation import mutants as of_gpu
from emulation import run as emulation
from emulation import unsupported
from mutant_copies import ROOT, occurrences

FAULTS = [fault for kind in sanitized.KINDS.values() for fault in kind.faults]
MUTANTS = (*mutants.MUTANTS, *of_gpu.MUTANTS, *FAULTS)


def test_the_text_of_every_mutant_occurs_once():
    assert {m.name: occurrences(m) for m in MUTANTS if occurrences(m) != 1} == {}


def test_tests_of_every_sanitizer_exist():
    listed = {part for kind in sanitized.KINDS.values() for part in kind.tests}
    paths = [part.split("=")[-1].split("::")[0] for part in listed]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_tests_of_every_mutant_exist():
    paths = [(m.name, test.partition("::")[0]) for m in MUTANTS for test in m.tests.split(" -k ")[0].split()]
    assert [name for name, path in paths if not (ROOT / path).exists()] == []


def test_every_gpu_test_that_the_emulation_skips_exists():
    files = [ROOT / path for path in emulation.PATHS]
    sources = [file for path in files for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    names = " ".join(source.stem + source.read_text() for source in sources)
    assert [part for part in unsupported.REASONS if part.split("[")[0] not in names] == []
