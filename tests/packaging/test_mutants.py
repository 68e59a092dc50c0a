"""The broken versions of `make test-mutants` still break what they say."""

import mutants


def test_the_text_of_every_mutant_stands_where_it_says_once():
    assert {m.name: mutants.occurrences(m) for m in mutants.MUTANTS if mutants.occurrences(m) != 1} == {}


def test_tests_of_every_mutant_are_there():
    paths = [
        (m.name, test.partition("::")[0])
        for m in mutants.MUTANTS
        for test in m.tests.split(" -k ")[0].split()
    ]
    assert [name for name, path in paths if not (mutants.ROOT / path).exists()] == []
