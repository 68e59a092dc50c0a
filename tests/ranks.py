"""Runs a script as two ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import forked


def run_on_two_ranks(folder: Path, text: str) -> None:
    """Run a script twice at once, with its rank and a file to meet at as arguments; both must succeed."""
    meeting = str(folder / "rendezvous")
    ranks = [forked.start(text, str(rank), meeting, GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    ended = [rank.wait() for rank in ranks]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(
        each.stdout + each.stderr for each in ended
    )
