"""The audit of two ranks: DistributedDataParallel, FSDP2, and loops that reduce by hand."""

import io
import os

import pytest
import rank_loops
import ranks
import torch.distributed as dist
from auditing_cases import are_close, factors
from ranks import on_ranks

from fusedacc.auditing import Audit
from fusedacc.auditing.ranks import RankFiles

#: What each faulty loop is told as: the kinds of its problems, with their factors.
FOUND = {
    "bad_ddp_no_sync_left_on": {"ranks": None},
    "bad_ddp_no_sync_on_last": {"lost": 0.625},
    "bad_ddp_zero_each": {"lost": 0.25},
    "bad_ddp_divided_by_ranks_too": {"scale": 0.5},
    "bad_ddp_not_divided": {"scale": 4.0},
    "bad_no_ddp": {"ranks": None},
    "bad_all_reduce_sum": {"ranks": 2.0},
    "bad_all_reduce_each": {"uneven": 8.0},
    "bad_ddp_tokens": {"uneven": 8.0},
    "bad_ddp_tokens_of_own_rank": {"uneven": 1.412},
    "bad_fsdp2_never_syncs_last": {"lost": 0.75, "stale": 1.0},
    "bad_fsdp2_zero_each": {"lost": 0.25},
    "bad_fsdp2_not_divided": {"scale": 4.0},
    "bad_fsdp2_not_divided_but_clipped": {"scale": 4.0},
    "bad_fsdp2_second_model": {"lost": 0.25},
}


@pytest.fixture(autouse=True, scope="module")
def processes_of_their_own():
    """The audit wraps functions of torch in these processes, so other tests get new ones."""
    ranks.close_pools()
    yield
    ranks.close_pools()


def audit_on_rank(name: str, folder: str) -> tuple[int | None, str, dict[str, float | None], int]:
    """Return status, text, problems and the number of micro-batches. On other ranks than 0 they are empty."""
    with Audit(folder=folder, output=io.StringIO()) as report:
        getattr(rank_loops, name)()
    micro_batches = report.as_json().get("micro_batches", 0)
    dist.barrier()
    return report.status, report.text, factors(report), micro_batches


@pytest.mark.parametrize("name", rank_loops.CASES)
def test_loops_on_two_ranks(name, tmp_path):
    (status, text, found, _), (other_status, other_text, *_) = on_ranks(2, audit_on_rank, name, str(tmp_path))
    assert (other_status, other_text) == (0, "")
    assert status == name.startswith("bad_"), text
    assert are_close(found, FOUND.get(name, {})), text
    assert "not checked" not in text
    assert not list(tmp_path.iterdir())


def test_the_report_counts_the_micro_batches_of_all_ranks(tmp_path):
    (_, text, _, micro_batches), _ = on_ranks(2, audit_on_rank, "right_ddp", str(tmp_path))
    assert micro_batches == 48
    assert "48 micro-batches, 6 updates, AdamW, float32, 2 ranks" in text


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("zero_redundancy", "the ranks hold different parameters: only those of rank 0 were checked"),
        ("other_optimizers", "the ranks made different numbers of updates: the last ones were not checked"),
    ],
)
def test_what_cannot_be_judged(name, note, tmp_path):
    (status, text, found, _), _ = on_ranks(2, audit_on_rank, name, str(tmp_path))
    assert (status, found) == (2, {}), text
    assert note in text
    assert "no update was seen" not in text


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    """The files are pickles, which can run any code."""
    files = RankFiles(str(tmp_path))
    assert files._path(1) == tmp_path / "1.updates"
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        files._path(1)
