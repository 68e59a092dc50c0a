"""The largest size that fits, compared with a search of all sizes, in few evaluations."""

import math
import random
from unittest import mock

import pytest

from fusedacc.planner.plans import TooSmallError, largest


def test_random_costs():
    draw = random.Random(11)
    for _ in range(500):
        most = draw.randrange(1, 200)
        costs = [draw.randrange(1, 50)]
        for _ in range(most - 1):
            costs.append(costs[-1] + draw.choice([0, 1, 3, draw.randrange(200)]))
        budget = draw.randrange(costs[0], costs[-1] + 20)
        ask = mock.Mock(side_effect=lambda size, costs=costs: costs[size - 1])
        assert largest(ask, most, budget) == sum(cost <= budget for cost in costs)
        asked = [each.args[0] for each in ask.call_args_list]
        assert all(1 <= size <= most for size in asked)
        assert len(asked) == len(set(asked))  # each size at most once
        assert len(asked) <= 3 * math.log2(most + 1) + 5


def test_limits():
    assert largest(lambda size: 5, 1, 5) == 1
    assert largest(lambda size: size, 8, 8) == 8
    assert largest(lambda size: size, 8, 1) == 1
    with pytest.raises(TooSmallError) as raised:
        largest(lambda size: 10 + size, 8, 10)
    assert (raised.value.cost, raised.value.budget) == (11, 10)
