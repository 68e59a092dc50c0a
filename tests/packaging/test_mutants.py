"""The mutants of `make test-mutants` can be made, and their tests exist."""

import mutants


def test_the_text_of_every_mutant_occurs_once():
    assert {m.name: mutants.occurrences(m) for m in mutants.MUTANTS if mutants.occurrences(m) != 1} == {}


def test_tests_of_every_mutant_exist():
    paths = [
        (m.name, test.partition("::")[0])
        for m in mutants.MUTANTS
        for test in m.tests.split(" -k ")[0].split()
    ]
    assert [name for name, path in paths if not (mutants.ROOT / path).exists()] == []
