"""The private names of PyTorch that fusedacc uses, and why no public name does the same.

- Private functions, classes and modules get a name here, and other files import that name.
- Private attributes of torch's public modules and of its objects are listed in `ATTRIBUTES`. Other files read
  them in place.

torch may change a private name in any version. tests/packaging/test_private_names.py fails if another file
uses one that is not here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, _compile, _guards, _ops, overrides
from torch._subclasses import fake_tensor
from torch.distributed.algorithms import join
from torch.utils import _device, _python_dispatch, _pytree

_C: Any = torch._C
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Classes that have no public name. torch's documentation imports `TorchDispatchMode` from this module too.

OpOverload = _ops.OpOverload
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
#: What a fake tensor mode raises if an operator's output depends on data, or an operator has no fake kernel.
DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
TorchDispatchMode = _python_dispatch.TorchDispatchMode
#: The mode that `torch.set_default_device` sets.
DefaultDeviceMode = _device.DeviceContext

# torch has no public functions for trees of lists, tuples and dicts.

keystr = _pytree.keystr
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_map_with_path = _pytree.tree_map_with_path

# Modes, transforms and traces: torch does not say in public which are active.

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
is_traceable_wrapper_subclass_type = _python_dispatch.is_traceable_wrapper_subclass_type
#: A context manager that disables all torch dispatch modes.
disable_dispatch_modes = _python_dispatch._disable_current_modes
#: A context manager that disables `__torch_function__` of all subclasses and modes.
DisableTorchFunction = _C.DisableTorchFunction
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
#: The same number as len(dispatch_modes()), without a list.
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes = overrides._get_current_function_mode_stack
num_function_modes: Callable[[], int] = _C._len_torch_function_stack
#: Returns the fake tensor mode that is active, or None.
active_fake_mode = _guards.detect_fake_mode
#: Returns the innermost transform of torch.func, or None. Dynamo cannot trace it.
innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
#: Whether a transform of torch.func is active. Dynamo can trace it.
transforms_are_active: Callable[[], bool] = _C._are_functorch_transforms_active

# Autograd's engine: torch has no public functions for the backward pass that is running.

#: Returns the number of the backward pass that this thread runs; -1 outside of one.
current_graph_task: Callable[[], int] = _C._current_graph_task_id
#: Returns the node that this thread runs, or None.
current_node: Callable[[], Any] = _C._current_autograd_node
#: Whether the running backward pass will run a node. Raises RuntimeError in `torch.autograd.grad`.
will_run: Callable[[Any], bool] = _C._will_engine_execute_node

#: Calls a function at the end of the running backward pass.
queue_callback: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Functions of which only the names are used

#: The function of torch.nn.utils.clip_grad that every clipping by norm calls. `clip_grad_norm_` would not do:
#: scripts import it by name, so a function in its place would not be called.
CLIP_GRADS_WITH_NORM = "_clip_grads_with_norm_"

# Tensors and storages

#: The references to a storage, by the address `UntypedStorage._cdata`.
storage_use_count: Callable[[int], int] = _C._storage_Use_Count
#: The references to a C++ tensor. All of Python's count as one.
tensor_references: Callable[[Tensor], int] = _C.TensorBase._use_count

#: Whether two tensors share memory. Public functions need a storage, which sparse tensors do not have.
share_memory: Callable[[Tensor, Tensor], bool] = _C._is_alias_of
#: A weak reference to the C++ tensor. `torch.utils.swap_tensors` refuses tensors with a `weakref.ref`.
WeakTensorRef = _C._WeakTensorRef
#: `Tensor.as_subclass`, which fastai replaces.
as_subclass: Callable[..., Any] = _C.TensorBase.as_subclass

# Devices


def current_raw_stream(index: int) -> int:
    """Return the address of a GPU's current stream. The public way creates a `Stream` in each call."""
    return _C._cuda_getCurrentRawStream(index)


def cuda_driver() -> int:
    """Return the newest CUDA that the driver supports, such as 12040; 0 if unknown. No public name."""
    return getattr(_C, "_cuda_getDriverVersion", lambda: 0)()


def has_amx() -> bool:
    """Return whether the CPU has AMX tiles. `torch.cpu.get_capabilities` is newer than torch 2.10."""
    return torch.cpu._is_amx_tile_supported()


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a Linear by oneDNN. Public functions choose between oneDNN and BLAS themselves."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether an operator has a kernel for a dispatch key. No public name."""
    return _C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


# The compiler. Importing it takes 1.3 s, so nothing here imports it for a program that does not compile.

#: Its decorator leaves a function and what it calls uncompiled. The public `torch.compiler.disable` imports
#: the compiler when it decorates. This one does so when the function is called.
disable_dynamo = _compile._disable_dynamo
_eval_frame: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)
#: Returns the compiler of the frames that this thread calls; None if they run uncompiled. No public name.
#: Check `torch.compiler.is_compiling()` first: Dynamo cannot trace a call of this C function.
frame_compiler: Callable[[], Any] = getattr(_eval_frame, "get_eval_frame_callback", type(None))


def runs_as_written(function: _Function, calls_too: bool = True) -> _Function:
    """Mark a function that Dynamo neither compiles nor looks into.

    Dynamo leaves frames of torch.nn such as `nn.Linear.forward` alone unless it inlines them; a function of
    ours in its place, or in a backward, would be compiled with further guards. It is still inlined into a
    compiled forward, where `torch.compiler.disable` would break the graph.

    calls_too: whether Dynamo also leaves alone what the function calls.
    """
    with contextlib.suppress(AttributeError):
        skip = _eval_frame._FrameAction.SKIP
        default = _eval_frame._FrameAction.DEFAULT
        strategy = _eval_frame._FrameExecStrategy(skip, skip if calls_too else default)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def assume_constant_result(function: _Function) -> _Function:
    """Do the same as `torch.compiler.assume_constant_result`, which imports the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions may have any attribute
    return function


def is_compiler_imported() -> bool:
    """Return whether the compiler is imported. torch.compiler has no function for this."""
    return "torch._dynamo" in sys.modules


def in_compiled_autograd_region() -> bool:
    """Return whether compiled autograd runs this backward. `torch.compiler.is_compiling` is false then."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and getattr(compiled, "in_compiled_autograd_region", False)


def traces_backward() -> bool:
    """Return whether Dynamo may trace a backward, in which autograd runs no hooks (torch 2.13 or newer).

    torch has no public name for this setting.
    """
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and getattr(config, "trace_autograd_ops", False)


def may_compile_backward() -> bool:
    """Return the same, or whether compiled autograd is on. Dynamo traces it, and makes guards of both."""
    from torch._dynamo import config

    return config.compiled_autograd or getattr(config, "trace_autograd_ops", False)


def traces_for_inductor() -> bool:
    """Return whether AOTAutograd traces for Inductor, as its configuration tells. No public name."""
    return torch._functorch.config.unlift_effect_tokens


def register_ordered_effect(operator: str, library: torch.library.Library) -> None:
    """Let compilers keep an operator's calls, and their order. torch.library has no public name for it."""
    ordered = torch._library.effects.EffectType.ORDERED
    torch.library._register_effectful_op(operator, ordered, lib=library)


def effects() -> Any:
    """Return the module of the higher-order operator that calls operators with effects. No public name."""
    return importlib.import_module("torch._higher_order_ops.effects")


def show_to_function_modes(function: Callable[..., Any]) -> None:
    """Let torch function modes see a private function under Dynamo, which shows them only public ones."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.variables.torch.get_overridable_functions().add(function)


# Join: `torch.distributed.algorithms.Joinable` wants an object of this class as an attribute.

JoinConfig = join._JoinConfig

# FSDP2


def composable_states() -> Any:
    """Return the module that knows the modules with FSDP2. `fully_shard.state(module)` needs each of them."""
    return importlib.import_module("torch.distributed._composable_state")


# Attributes that other files read in place

#: By kind of object: attributes that torch does not document, and why no public one does the same. "a or b"
#: means that one of them is enough. Names without an underscore belong to classes that are private.
ATTRIBUTES: dict[str, dict[str, str]] = {
    # Modules
    "torch": {
        "_assert_async": "torch documents the operator under this name only",
        "_check": "torch documents it under this name only",
        "_foreach_add_": "torch documents the operator under this name only",
        "_foreach_copy_": "torch documents the operator under this name only",
        "_foreach_norm": "torch documents the operator under this name only",
        "_foreach_zero_": "torch documents the operator under this name only",
        "_grouped_mm": "Transformers calls it in place of nn.functional.grouped_mm",
    },
    "torch.ops.aten": {
        "_grouped_mm": "nn.functional.grouped_mm calls this operator",
        "_foreach_add_": "torch._foreach_add_ calls this operator",
        "_log_softmax": "nn.functional.cross_entropy calls this operator",
        "_to_copy": "Tensor.to calls this operator",
    },
    "torch.autograd.forward_ad": {"_current_level": "whether forward-mode AD is on; no public name"},
    "torch.compiler": {"_is_exporting_flag": "Dynamo of torch 2.10 takes is_exporting() for True"},
    "torch.cuda": {"_sleep": "keeps a GPU busy for a known time; no public name"},
    "torch.cuda.memory": {
        "_record_memory_history": "torch documents it under this name only",
        "_snapshot": "memory_snapshot() has no events",
    },
    "torch.utils.flop_counter": {
        "_FlopCounterMode": "the inner mode of FlopCounterMode, which has no public name",
    },
    # Tensors and the graph
    "Tensor": {
        "_backward_hooks": "whether hooks are registered; register_hook tells nothing of the others",
        "_base": "the tensor that a view belongs to; no public name",
        "_cdata": "the address of the C++ tensor, which other Python objects of it share; no public name",
        "_indices": "indices() refuses sparse tensors that are not coalesced",
        "_is_param": "isinstance(..., nn.Parameter) asks for it",
        "_is_view": "whether it is a view of another tensor, of which autograd knows; no public name",
        "_is_zerotensor": "whether it has no memory and is zero; no public name",
        "_make_wrapper_subclass": "creates a tensor without memory of a subclass; no public name",
        "_post_accumulate_grad_hooks": "the hooks that are registered; no public name",
        "_values": "values() refuses sparse tensors that are not coalesced",
        "_version": "the number of in-place writes; torch documents it under this name only",
    },
    "UntypedStorage": {
        "_cdata": "tells storages apart. data_ptr() is 0 for all that are empty, fake or on meta",
    },
    "DTensor": {
        "_local_tensor": "to_local() adds a node to the graph, and waits for collectives",
        "_spec": "mesh, placements and shape in one object; DTensor.from_local takes ten times as long",
    },
    "graph node": {
        "_input_metadata": "dtype and shape of what a node returns; no public name",
        "_saved_condition": "the condition of torch.where; torch documents such names only",
        "_saved_ignore_index": "the label that a loss ignores; the same",
        "_saved_other": "the operand of a product or a quotient, a number or a tensor; the same",
        "_saved_reduction": "whether a loss is a mean or a sum; the same",
        "_saved_self": "the other operand, or the input of a loss; the same",
        "_saved_self_sym_numel": "over how many elements a mean is taken; the same",
        "_saved_self_sym_sizes": "the shape of what a sum adds; the same",
        "_saved_target": "the labels of a loss; the same",
        "_saved_total_weight": "the number of labels that a loss does not ignore; the same",
        "_saved_weight": "the class weights of a loss; the same",
    },
    "OpOverload": {"_schema": "names and types of the arguments; no public name"},
    # nn.Module and its subclasses
    "nn.Module": {"_parameters": "a module's own entry, read in each call; named_parameters() searches"},
    "nn.Conv2d": {
        "_conv_forward": "the forward with another weight; functional_call replaces it for all threads",
        "_output_padding": "the forward's arguments from output_size; no public name",
    },
    # GradScaler, which fusedacc.amp derives from
    "GradScaler": {
        "_check_scale_growth_tracker": "the scale as a tensor; get_scale() waits for the device",
        "_device": "where the scale is made; no public name",
        "_lazy_init_scale_growth_tracker": "makes the scale before scale(loss); no public name",
        "_per_optimizer_states": "the inf checks and the stage of an optimizer; no public name",
        "_scale": "the scale as a tensor; get_scale() waits for the device",
    },
    # torch.optim
    "Optimizer": {
        "_opt_called": "learning rate schedulers read it, and warn without it",
        "_optimizer_step_pre_hooks": "whether hooks are registered; no public name",
    },
    # DistributedDataParallel
    "DistributedDataParallel": {
        "_build_debug_param_to_name_mapping": "makes a new reducer, as unpickling does; no public name",
        "_build_params_for_reducer": "makes a new reducer, as unpickling does; no public name",
        "_comm_hooks": "whether register_comm_hook was called; no public name",
        "_ddp_init_helper": "makes a new reducer, as unpickling does; no public name",
        "_delay_all_reduce_params": "an option of the constructor; no public name",
        "_has_rebuilt_buckets": "whether the reducer has seen a backward pass; no public name",
        "_join_config": "whether join() is active; no public name",
        "_pre_forward": "runs in each forward pass and sees no_sync(); public hooks see no DDP inside it",
        "_set_static_graph": "of a new reducer and its logger, as unpickling does; no public name",
        "_static_graph_delay_allreduce_enqueued": "whether the next backward pass reduces; no public name",
        "_sync_buffers": "sends the buffers outside a forward pass; no public name",
        "_use_python_reducer": "whether a compiled graph reduces; no public name",
    },
    # FSDP2: fully_shard sets public flags on modules, and tells nothing of its parameters' gradients. Its
    # classes are private. FSDP2 adds `_unsharded_param` in the first forward pass.
    "FSDP2 registry": {
        "_module_state_mapping": "the states of all modules with FSDP2; no public name",
    },
    "FSDP2 state": {
        "_fsdp_param_groups or _fsdp_param_group": "the groups; no public name",
        "_state_ctx": "the context of all states of a root module; no public name",
        "_is_root": "whose backward pass ends all others; no public name",
        "_root_post_backward_final_callback": "reduces outside a backward pass; no public name",
    },
    "FSDP2 context": {
        "all_states": "the groups of a root module; no public name",
        "iter_forward_root": "reset after a failure; reset_iter_state() is newer than torch 2.10",
        "is_last_backward": "set_is_last_backward() sets it, and nothing reads it",
        "post_backward_final_callback_queued": "whether a backward pass has failed; no public name",
    },
    "FSDP2 group": {
        "modules": "whose parameters it has; no public name",
        "fsdp_params": "its parameters; no public name",
        "mesh_info": "over which ranks it reduces; no public name",
        "reduce_grads": "set_requires_gradient_sync() sets it, and nothing reads it",
        "all_reduce_grads": "set_requires_all_reduce() sets it, and nothing reads it",
        "reshard_after_backward": "set_reshard_after_backward() sets it, and nothing reads it",
        "gradient_divide_factor": "set_gradient_divide_factor() sets it, and nothing reads it",
        "_partial_reduce_output": "what set_requires_all_reduce(False) keeps; no public name",
        "post_backward": "takes the gradients of a backward pass; no public name",
    },
    "hybrid FSDP2 group": {
        "device_handle": "the streams of its device; no public name",
        "comm_ctx": "the stream on which it adds shards up; no public name",
    },
    "hybrid FSDP2 parameter": {
        "padded_sharded_param_size": "the size of its shard on all ranks; no public name"
    },
    "reduced FSDP2 group": {"_orig_dtype": "the dtype of reduced gradients; no public name"},
    "FSDP2 mesh": {
        "mesh": "over which ranks it reduces; no public name",
        "shard_mesh_dim": "over which ranks it reduces; no public name",
        "replicate_mesh_dim": "over which ranks it reduces; no public name",
    },
    "FSDP2 parameter": {
        "sharded_param": "the parameter that the optimizer has; no public name",
        "mp_policy": "the dtypes that it was given; no public name",
        "unsharded_accumulated_grad": "what set_requires_gradient_sync(False) keeps; no public name",
        "_orig_size": "the whole parameter's size; no public name",
    },
    "unsharded FSDP2 parameter": {
        "_unsharded_param": "the parameter in the graph; after a backward pass modules have the shard",
        "reduce_dtype": "the dtype on the wire, without what needs no cast; no public name",
    },
    # torch 2.15 only
    "newer FSDP2 parameter": {
        "_has_sharded_grad_dtype_override": "whether grad_dtype was set by hand; no public name",
    },
    # Pipelines: schedules and stages keep to themselves what they were given.
    "torch.distributed.pipelining.schedules": {
        "PipelineScheduleSingle": "the base class of all schedules of one stage a rank",
        "PipelineScheduleMulti": "the base class of all other schedules",
    },
    "pipeline schedule": {
        "_stages or _stage": "this rank's stages; no public name",
        "_n_microbatches": "an argument of the constructor; no public name",
        "_has_backward": "whether it trains; no public name",
        "scale_grads": "an argument of the constructor, which the documentation omits",
    },
    "pipeline stage": {
        "submod": "its module; no public name",
        "stage_index": "its number; no public name",
        "group": "its process group; no public name",
        "group_rank": "its rank there; no public name",
        "device": "its device; no public name",
        "dw_builder": "an argument of the constructor; no public name",
        "scale_grads": "divides gradients by the number of micro-batches; no public name",
        "backward_one_chunk": "runs one micro-batch's backward pass; no public name",
        "perform_reduce_grad": "has DDP or FSDP2 reduce; no public name",
    },
}


def missing(kind: str, value: Any) -> str:
    """Return which attribute a value of this kind lacks, in words; empty if it has all of them.

    Call it before you change anything. Leave an object that lacks an attribute to PyTorch, with this reason.
    """
    for names in ATTRIBUTES[kind]:
        if not any(hasattr(value, name) for name in names.split(" or ")):
            return f"this version of torch ({torch.__version__}) has no {kind} attribute {names}"
    return ""
