"""A part-filled window of many ranks in checkpoints: loaded on as many ranks, on more, and on one."""

from __future__ import annotations

import textwrap

from ranks import run_on_ranks

SETUP = textwrap.dedent(
    """
    import copy, gc, sys
    from contextlib import nullcontext
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
    )
    from torch.nn.parallel import DistributedDataParallel
    import fusedacc
    from fusedacc.integrations.distributed_checkpoint import make_room
    from ranks_setting import error_of, refused

    rank, rendezvous, ranks, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    meeting = dict(init_method=f"file://{rendezvous}", timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, **meeting)
    K = 4
    ROUNDED = {"accumulate_dtype": torch.bfloat16, "rounding": "stochastic", "seed": rank}
    ROUNDED["max_grad_norm"] = 0.1
    OPTIONS = {
        "mean": {},
        "bfloat16": {"dtype": torch.bfloat16, "master_weights": True},
        "sum": {"reduction": "sum"},
        "weighted": {"reduction": "weighted"},
        "normalized": {"reduction": "normalized", "ddp": False},
        "private": {"private_gradients": True, "max_grad_norm": 0.1},
        "backwards": {"backwards": 2},
        "reduced": {},
        "reduced weighted": {"reduction": "weighted"},
        "manual": {"steps": None},
        "manual group": {"steps": None, "ddp": False},
        "manual mean": {"steps": None, "reduction": "mean"},
        "stochastic": {"dtype": torch.bfloat16, **ROUNDED},
        "reduced stochastic": ROUNDED,
        "manual stochastic": {"steps": None, "reduction": "mean", **ROUNDED},
    }

    class Pair:
        '''A model, wrapped as an option says, and its loop.'''

        def __init__(self, name, alone=False):
            options = dict(OPTIONS[name])
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
            self.model.to(options.pop("dtype", torch.float32))
            self.net, self.backwards = self.model, options.pop("backwards", 1)
            given = None if alone else dist.group.WORLD
            if options.pop("ddp", True) and not alone:
                self.net = given = DistributedDataParallel(self.model)
            inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.steps, self.data_parallel = options.pop("steps", K), given
            make = fusedacc.AccumulatingOptimizer
            self.optimizer = make(inner, self.steps, data_parallel=given, **options)
            self.weighs = self.optimizer.reduction in ("weighted", "normalized")

        def loss(self, index, of_rank):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + of_rank))
            return self.net(x.to(self.model[0].weight.dtype)).pow(2).mean()

        def weight(self, index, of_rank):
            return index + 1.5 + of_rank

        def silence(self, index):
            by_hand = self.steps is None and self.net is not self.model and (index + 1) % K
            return self.net.no_sync() if by_hand else nullcontext()

        def backward(self, index):
            weight = self.weight(index, rank) if self.weighs else None
            with self.silence(index), self.optimizer.accumulate(weight=weight):
                for part in range(self.backwards):
                    self.loss(index + 50 * part, rank).backward()

        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

        def train(self, indices):
            for index in indices:
                self.backward(index)
                if self.steps or (index + 1) % K == 0:
                    self.step()

        def finish(self, indices):
            '''What two ranks would add in these micro-batches, on however many there are.'''
            counts = self.optimizer.reduction == "mean"
            if counts:  # micro-batches are not what they were: the window ends here
                self.optimizer.flush() if self.steps else self.optimizer.step()
                return
            for index in indices:
                owned = range(2) if ranks == 1 else [rank] if rank < 2 else []
                losses = [self.loss(index, each) for each in owned] or [0.0 * self.loss(index, 0)]
                weights = [self.weight(index, each) for each in owned] or [0.0]
                weight = sum(weights) if self.weighs else None
                if self.optimizer.reduction == "weighted" and weight:
                    losses = [loss * (w / weight) for loss, w in zip(losses, weights)]
                elif self.optimizer.reduction == "sum":
                    losses = [loss * (ranks / 2) for loss in losses]
                with self.silence(index), self.optimizer.accumulate(weight=weight):
                    sum(losses).backward()
                if self.steps:
                    self.step()
            if self.steps is None:
                self.step()

        def parameters(self):
            return torch.cat([p.detach().flatten() for p in self.model.parameters()])

        def tree(self):
            state = get_optimizer_state_dict(self.model, self.optimizer)
            return {"model": self.model.state_dict(), "training": {"optim": state}}

    def resumed(name, path, alone=False):
        pair = Pair(name, alone)
        state = pair.tree()
        make_room(state, path)
        dcp.load(state, checkpoint_id=path)
        pair.model.load_state_dict(state["model"])
        set_optimizer_state_dict(pair.model, pair.optimizer, state["training"]["optim"])
        return pair

    def end():
        gc.collect()  # no reducer left when the threads of the group end
        dist.barrier()
        dist.destroy_process_group()
    """
)
SAVES = textwrap.dedent(
    """
    finished = {}
    for name in OPTIONS:
        pair = Pair(name)
        pair.train(range(K + 2))
        if name.startswith("reduced"):  # over after the last backward, and step() is yet to come
            pair.train([K + 2]), pair.backward(K + 3)
        path, file = f"{folder}/{name}", f"{folder}/{name}-{rank}.pt"
        dcp.save(pair.tree(), checkpoint_id=path)
        torch.save([pair.model.state_dict(), pair.optimizer.state_dict()], file)

        again, by_file, ending = resumed(name, path), Pair(name), resumed(name, path)
        model, optimizer = torch.load(file)
        by_file.model.load_state_dict(model)
        by_file.optimizer.load_state_dict(optimizer)
        ending.finish(range(0) if name.startswith("reduced") else range(K + 2, 2 * K))
        if name.startswith("reduced"):
            ending.step()
        if "rounding" not in OPTIONS[name]:  # other numbers of ranks have other errors
            finished[name] = ending.parameters()
        assert ending.optimizer.num_updates == 2, name

        for each in (pair, again, by_file):
            if name.startswith("reduced"):
                each.step()
                each.train(range(2 * K, 3 * K + 1))
            else:
                each.train(range(K + 2, 3 * K + 1))
            each.optimizer.flush()
            assert each.optimizer.num_updates == 4, name
            assert torch.equal(each.parameters(), pair.parameters()), name
            each.optimizer.close()
    torch.save(finished, f"{folder}/finished-{rank}")
    end()
    """
)
REFUSALS = textwrap.dedent(
    """
    def same(optimizer, other, what):
        for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q), what

    pair = Pair("weighted")
    pair.train(range(K + 2))
    torch.save(pair.optimizer.state_dict(), f"{folder}/own-{rank}.pt")
    dcp.save(pair.tree(), checkpoint_id=f"{folder}/own")
    dist.barrier()
    others = torch.load(f"{folder}/own-{1 - rank}.pt")
    loaded = Pair("weighted")
    before = loaded.optimizer.state_dict()
    wrong = f"the sums of rank {1 - rank} where those of rank {rank}"
    refused(ValueError, wrong, lambda: loaded.optimizer.load_state_dict(others))
    for key in ("fusedacc_rank_sum", "fusedacc_rank_counters"):
        damaged = copy.deepcopy(torch.load(f"{folder}/own-{rank}.pt"))
        del damaged["state"][1][key]
        error_of(ValueError, lambda: loaded.optimizer.load_state_dict(damaged))
    damaged = copy.deepcopy(torch.load(f"{folder}/own-{rank}.pt"))
    damaged["state"][0]["fusedacc_rank_counters"].to_local()[0, 5] = 200
    refused(ValueError, "damaged", lambda: loaded.optimizer.load_state_dict(damaged))
    assert (loaded.optimizer.num_updates, loaded.optimizer.state_dict()) == (0, before)

    # Without data_parallel, and without room.
    alone = Pair("weighted", alone=True)
    state = alone.tree()
    make_room(state, f"{folder}/own")
    dcp.load(state, checkpoint_id=f"{folder}/own")
    optim = state["training"]["optim"]
    load = lambda pair: set_optimizer_state_dict(pair.model, pair.optimizer, optim)
    refused(ValueError, "data_parallel=", lambda: load(alone))
    state = loaded.tree()
    dcp.load(state, checkpoint_id=f"{folder}/own")
    optim = state["training"]["optim"]
    refused(ValueError, "make_room", lambda: load(loaded))

    # Gathered on every rank, each takes its own row.
    whole = get_optimizer_state_dict(
        pair.model, pair.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    loaded.model.load_state_dict(pair.model.state_dict())
    set_optimizer_state_dict(loaded.model, loaded.optimizer, copy.deepcopy(whole))
    for each in (pair, loaded):
        each.train(range(K + 2, 2 * K))
    assert loaded.optimizer.num_updates == 2
    same(pair.optimizer, loaded.optimizer, "gathered")

    # A copy would have no ranks.
    copy.deepcopy(pair.optimizer)
    pair.train([0])
    refused(RuntimeError, "data_parallel", lambda: copy.deepcopy(pair.optimizer))
    assert "fusedacc_rank_sum" not in str(pair.optimizer.state_dict(include_partial=False))

    # Windows that only some ranks have begun.
    uneven = Pair("mean")
    if rank == 0:
        uneven.train([0])
    tree = {"optim": get_optimizer_state_dict(uneven.model, uneven.optimizer)}
    error_of(dcp.api.CheckpointException, lambda: dcp.save(tree, checkpoint_id=f"{folder}/uneven"))

    # What one process has saved: the first rank goes on with its sums.
    for name in ("mean", "weighted", "manual"):
        alone, loaded = Pair(name, alone=True), Pair(name)
        for index in range(2):
            with alone.optimizer.accumulate(weight=2.0 if alone.weighs else None):
                alone.loss(index, 0).backward()
            if alone.steps:
                alone.step()
        loaded.optimizer.load_state_dict(alone.optimizer.state_dict())
        if not alone.steps:  # p.grad as it stands is one rank's
            for each in (alone, loaded):
                with torch.enable_grad():
                    (0.0 * each.loss(2, 0)).backward()
        for each in (alone, loaded):
            each.optimizer.flush()
        assert alone.optimizer.num_updates == loaded.optimizer.num_updates == 1
        torch.testing.assert_close(alone.parameters(), loaded.parameters(), rtol=1e-6, atol=1e-7)
    end()
    """
)
LOADS = textwrap.dedent(
    """
    finished = torch.load(f"{folder}/finished-0")
    worst = {}
    for alone in (False, True) if ranks == 1 else (False,):
        for name, wanted in finished.items():
            pair = resumed(name, f"{folder}/{name}", alone)
            if name.startswith("reduced"):
                pair.step()
            else:
                pair.finish(range(K + 2, 2 * K))
            assert pair.optimizer.num_updates == 2, name
            difference = (pair.parameters().double() - wanted.double()).norm() / wanted.double().norm()
            worst[name] = difference.item()
    for name, difference in worst.items():  # three ranks' losses are multiplied by 3/2, which rounds
        assert difference <= (3e-8 if OPTIONS[name].get("steps", K) is None else 1.5e-8), worst
    end()
    """
)


def test_windows_go_on_on_two_ranks_three_and_one(tmp_path):
    """Bit for bit on two, where they were saved."""
    for ranks, script in ((2, SAVES), (3, LOADS), (1, LOADS)):
        run_on_ranks(tmp_path, SETUP + script, ranks, str(tmp_path))


def test_what_is_not_this_ranks_is_refused(tmp_path):
    run_on_ranks(tmp_path, SETUP + REFUSALS, 2, str(tmp_path))
