"""The reducer of a DistributedDataParallel, put away while nobody needs it: its buckets are as large as all
gradients, 4 bytes a float32 parameter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class IdleReducer:
    """Stands in a DistributedDataParallel where its reducer was, and the logger, which holds the reducer."""

    def _rebuild_buckets(self) -> bool:
        """Asked by every forward; there are none."""
        return False

    def get_backward_stats(self) -> list[int]:
        """No backward is ever reduced."""
        return []

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Nothing was logged; Lightning asks at its end."""
        return SimpleNamespace(strs_map={}, ints_map={})

    def _set_uneven_input_join(self) -> None:
        """Told by `Join`, before the forward that refuses it in words."""

    def set_error_and_log(self, error: str) -> None:
        """Told of an error that is raised next."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this DistributedDataParallel has no reducer as long as an AccumulatingOptimizer "
            "reduces its gradients; optimizer.close() gives it back"
        )


def put_away(parallel: DistributedDataParallel) -> None:
    """Let the reducer go, with its hooks and its memory. `bring_back` makes it anew."""
    idle = IdleReducer()
    parallel.__dict__.update(reducer=idle, logger=idle)


def bring_back(parallel: DistributedDataParallel) -> None:
    """Make a reducer as the one that was put away, unless the process group is gone.

    As torch does when a DistributedDataParallel is unpickled (nn/parallel/distributed.py, `__setstate__`).
    """
    if not (isinstance(parallel.reducer, IdleReducer) and dist.is_initialized()):
        return
    parameters, expects_sparse = parallel._build_params_for_reducer()
    names = parallel._build_debug_param_to_name_mapping(parameters)
    parallel._ddp_init_helper(parameters, expects_sparse, names, parallel.static_graph)
    parallel._has_rebuilt_buckets = False
    if parallel.static_graph:
        parallel.reducer._set_static_graph()
        parallel.__dict__["logger"]._set_static_graph()
