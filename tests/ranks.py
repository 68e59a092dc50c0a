"""Runs a script as several ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import forked


def start_ranks(folder: Path, text: str, ranks: int, *arguments: str) -> list[forked.Running]:
    """Start a script on so many ranks, with its rank, a file to meet at, the ranks and `arguments`."""
    meeting = folder / "rendezvous"
    meeting.unlink(missing_ok=True)
    given = str(meeting), str(ranks), *arguments
    return [forked.start(text, str(rank), *given, GLOO_SOCKET_IFNAME="lo") for rank in range(ranks)]


def run_on_ranks(
    folder: Path, text: str, ranks: int, *arguments: str, seconds: float = 120
) -> list[CompletedProcess[str]]:
    """As `start_ranks`, to their ends, within so many seconds; all must succeed."""
    ended = [rank.wait(seconds) for rank in start_ranks(folder, text, ranks, *arguments)]
    assert [each.returncode for each in ended] == [0] * ranks, "\n".join(
        each.stdout + each.stderr for each in ended
    )
    return ended


def run_on_two_ranks(folder: Path, text: str) -> None:
    """Run a script twice at once, with its rank and a file to meet at as arguments; both must succeed."""
    run_on_ranks(folder, text, 2)
