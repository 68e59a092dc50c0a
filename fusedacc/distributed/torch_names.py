"""Checks that this version of torch has the private names that FSDP2 and pipelines need.

torch may rename them in any version. Call `missing` before you change anything, and leave an object that
lacks a name to PyTorch, with the reason that `missing` returns.
"""

from __future__ import annotations

from typing import Any

import torch

#: The attributes that are used, by kind of object; "a or b" means that one of them is enough. FSDP2 adds
#: `_unsharded_param` in the first forward pass.
NAMES: dict[str, list[str]] = {
    "torch.distributed._composable_state": ["_module_state_mapping"],
    "FSDP2 state": [
        "_fsdp_param_groups or _fsdp_param_group",
        "_state_ctx",
        "_is_root",
        "_root_post_backward_final_callback",
    ],
    "FSDP2 context": [
        "all_states",
        "iter_forward_root",
        "is_last_backward",
        "post_backward_final_callback_queued",
    ],
    "FSDP2 group": [
        "modules",
        "fsdp_params",
        "mesh_info",
        "reduce_grads",
        "all_reduce_grads",
        "reshard_after_backward",
        "gradient_divide_factor",
        "_partial_reduce_output",
        "post_backward",
    ],
    "reduced FSDP2 group": ["_orig_dtype"],
    "FSDP2 mesh": ["mesh", "shard_mesh_dim", "replicate_mesh_dim"],
    "FSDP2 parameter": ["sharded_param", "mp_policy", "unsharded_accumulated_grad", "_orig_size"],
    "unsharded FSDP2 parameter": ["_unsharded_param", "reduce_dtype"],
    "torch.distributed.pipelining.schedules": ["PipelineScheduleSingle", "PipelineScheduleMulti"],
    "pipeline schedule": ["_stages or _stage", "_n_microbatches", "_has_backward", "scale_grads"],
    "pipeline stage": [
        "submod",
        "stage_index",
        "group",
        "group_rank",
        "device",
        "dw_builder",
        "scale_grads",
        "backward_one_chunk",
        "perform_reduce_grad",
    ],
}


def missing(kind: str, value: Any) -> str:
    """Return which attribute a value of this kind lacks, in words; empty if it has all of them."""
    for names in NAMES[kind]:
        if not any(hasattr(value, name) for name in names.split(" or ")):
            return f"this version of torch ({torch.__version__}) has no {kind} attribute {names}"
    return ""
