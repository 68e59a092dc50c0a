"""A program whose ranks train in several ways, one after the other, and count the bytes of each window.

Its arguments are a folder for the ranks' results, the number of ranks, the ways as JSON, and "alone" for a
separate network without other traffic, or "shared". If the kernel refuses a separate network, it prints the
reason and exits with `NOT_ALLOWED`.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

NOT_ALLOWED = 77
#: The errors of a kernel that does not allow separate networks for this user, in this sandbox, or not more of
#: them.
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOSPC, errno.EUSERS)
WIDTH, LAYERS = 384, 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
#: DDP rebuilds its buckets after its first backward, and the wrapper learns from its first two. So only
#: windows after the first LEARNING ones count.
STEPS, WINDOWS, LEARNING = 2, 6, 2


def enter_a_separate_network() -> None:
    """Enter a new network namespace, which contains only the interface `lo`, and enable that interface.

    Raises:
        OSError: the kernel refuses.
    """
    clone_newuser, clone_newnet = 0x10000000, 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newuser | clone_newnet):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack("16xH14x", found)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def sent_so_far() -> int:
    """Return the bytes that the kernel has sent over `lo`, including headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


class Collectives(TorchDispatchMode):
    """Counts the bytes that this process passes to each of torch's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            passed = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            tensors = [each for each in passed if isinstance(each, torch.Tensor)]
            self.sizes.append(sum(tensor.nbytes for tensor in tensors))
        return operator(*args, **(kwargs or {}))


def trainer(loop: str, reduced_by: str, options: dict[str, Any]) -> tuple[Callable[[int], None], Any]:
    """Return a function that runs the micro-batch with this index, and the wrapper or None.

    Args:
        loop: "each" (plain PyTorch without `no_sync()`), "stock" (plain PyTorch), "counted" or "manual".
        reduced_by: "ddp", "group", or "replicas": FSDP2 on two replicas of two shards.
        options: options for the wrapper. For "replicas", those of `accumulate()`.
    """
    torch.manual_seed(0)
    if reduced_by == "replicas":
        return sharded_trainer(options), None
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, weighs = torch.ones(2, WIDTH), options.get("reduction") == "weighted"
    called = model if reduced_by == "group" else DistributedDataParallel(model)
    wrapper = None
    if loop in ("counted", "manual"):
        import fusedacc

        if "reduce_dtype" in options:
            options["reduce_dtype"] = getattr(torch, options["reduce_dtype"])
        ranks = dist.group.WORLD if reduced_by == "group" else called
        steps = STEPS if loop == "counted" else None
        optimizer = wrapper = fusedacc.AccumulatingOptimizer(optimizer, steps, data_parallel=ranks, **options)

    def run(index: int) -> None:
        last, context = index == STEPS - 1, contextlib.nullcontext()
        if loop in ("stock", "manual") and not last:
            context = called.no_sync()
        elif weighs:
            context = wrapper.accumulate(weight=1.0 + dist.get_rank())
        with context:
            (called(inputs).square().mean() / (1 if loop == "counted" else STEPS)).backward()
        if last or loop == "counted":
            optimizer.step(), optimizer.zero_grad()

    return run, wrapper


def sharded_trainer(options: dict[str, Any]) -> Callable[[int], None]:
    """Return a function that runs a micro-batch with FSDP2 on two replicas of two shards."""
    import fusedacc

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), STEPS)

    def run(_index: int) -> None:
        with optimizer.accumulate(model, **options):
            model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()

    return run


def count(run: Callable[[], None]) -> tuple[list[int], int]:
    """Return the sizes of this rank's collectives, and the bytes that all ranks have sent."""
    dist.barrier()
    before = sent_so_far()
    dist.barrier()
    with Collectives() as collectives:
        run()
    dist.barrier()
    after = sent_so_far()
    dist.barrier()
    return collectives.sizes, after - before


def run_rank(rank: int, world: int, folder: Path, ways: dict[str, Any]) -> None:
    """Train in each way and write the bytes that a window sends, by micro-batch.

    The result is the minimum over the counted windows, because TCP may resend data on a busy machine.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = {}
    for name, (loop, reduced_by, options) in ways.items():
        train, wrapper = trainer(loop, reduced_by, options)
        windows = []
        for _ in range(WINDOWS):
            counts = [count(functools.partial(train, index)) for index in range(STEPS)]
            sizes, sent = zip(*counts, strict=True)
            windows.append(sent)
        least = [min(of_step) for of_step in zip(*windows[LEARNING:], strict=True)]
        found[name] = {"sizes": sizes, "sent": least}
        if wrapper is not None:
            found[name]["updates"] = wrapper.num_updates
            found[name]["buckets"] = len(wrapper._accumulation.ranks.parallel.reducer.buckets())
            wrapper.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    del train
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, world, ways, network = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if network == "alone":
        try:
            enter_a_separate_network()
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            print(error)
            sys.exit(NOT_ALLOWED)
    importlib.import_module("fusedacc")  # import it once, and not on every rank
    sys.exit(fork_ranks(world, lambda rank: run_rank(rank, world, folder, ways)))


if __name__ == "__main__":
    main()
