"""How long the phases of an update take."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from examples.demo.measure import batches, synchronize

from ..contestants.training_loops import PHASES, Loop


class Clock:
    """Marks the ends of phases, without waiting for the device; all time is some phase's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        synchronize(device)
        self._mark("start")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self._mark(name)

    def _mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """By phase, all its turns together."""
        synchronize(self.device)
        found = dict.fromkeys(PHASES, 0.0)
        for (_, before), (name, after) in itertools.pairwise(self.marks):
            on_device = isinstance(after, torch.cuda.Event)
            found[name] += before.elapsed_time(after) / 1e3 if on_device else after - before
        return found


class Timed:
    """A loop, and what each of its updates took; update i has the same data in every loop."""

    def __init__(self, loop: Loop, text: Tensor) -> None:
        self.loop, self.text = loop, text
        self.losses: list[float] = []
        self.seconds: list[dict[str, float]] = []

    def run(self) -> float:
        """Seconds of one update."""
        data = batches(self.text, self.loop.config, len(self.losses))
        clock = Clock(self.loop.config.device)
        loss = self.loop.update(data, clock.phase)
        self.seconds.append(clock.seconds())
        self.losses.append(loss.item())
        return sum(self.seconds[-1].values())


def by_phase(own: Sequence[dict[str, float]], baseline: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Each round's seconds with `backward` that of the baseline, and what it took longer in `accumulate`."""
    return [
        {
            **mine,
            "backward": plain["backward"],
            "accumulate": mine["backward"] - plain["backward"] + mine["accumulate"],
        }
        for mine, plain in zip(own, baseline, strict=True)
    ]
