"""Checks that different ways of training a mixture of experts accumulate the same gradients."""

from collections.abc import Mapping

import torch

from benchmarks.suites.layers import STOCK, EndlessWindow


def assert_ways_add_the_same(ways: Mapping[str, EndlessWindow], atol: float) -> None:
    """Run two micro-batches in each way, and compare the direction of every sum with plain PyTorch's."""
    for own in ways.values():
        own.run()
        own.run()
    sums = {way: _sums_of(own) for way, own in ways.items()}
    for way, found_sums in sums.items():
        for ours, theirs in zip(found_sums, sums[STOCK], strict=True):
            assert ours.dtype == torch.float32
            # Sums for a mean have a different scale until the update divides them.
            found, wanted = (each.float() / each.float().norm().clamp(min=1e-12) for each in (ours, theirs))
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=atol, msg=way)


def _sums_of(own: EndlessWindow) -> list[torch.Tensor]:
    if own.optimizer is not None:
        return [slot.accumulator for slot in own.optimizer._slots]
    return own.sums or [p.grad for p in own.model.parameters()]
