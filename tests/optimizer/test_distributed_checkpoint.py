"""State dicts of torch.distributed.checkpoint of a wrapped optimizer, in one process."""

import copy
import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import LOW, expected, gradients, identical, loss_of, micro_batch, network, wrap
from test_resume import WAYS, assert_resumes, settings
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedacc.integrations.distributed_checkpoint import make_room


def pair(steps, dtype=torch.float32):
    model = network(dtype)
    return model, wrap(model, steps, torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_getting_the_state_of_a_new_optimizer_makes_no_update(steps):
    model, optimizer = pair(steps)
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert {"exp_avg", "exp_avg_sq", "step"} <= state["0.weight"].keys()
    assert (optimizer.num_updates, optimizer.micro_step, optimizer.has_updated) == (0, 0, False)
    assert gradients(model) == [None] * 4
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_saving_inside_the_first_window_does_not_change_the_window():
    """The optimizer has no state yet, and torch creates it with zeros in p.grad."""
    model, optimizer = pair(2)
    wanted = expected(model, (0, 1), 0.5)
    micro_batch(model, optimizer, 0)
    get_optimizer_state_dict(model, optimizer)
    assert gradients(model) == [None] * 4
    optimizer.step()  # no backward: it does not count
    assert (optimizer.num_updates, optimizer.micro_step) == (0, 1)
    loss_of(model, 1).backward()
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-5, atol=1e-6)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    norm = torch.nn.utils.get_total_norm(gradients(model))
    assert optimizer.num_updates == 1
    assert norm < 1.01e-3


@pytest.mark.parametrize(("steps", "moves"), [(None, False), (2, False), (2, True)])
def test_gradients_count_with_lr_zero(steps, moves):
    """Zeros and lr=0 must not be mistaken for torch's way to create state.

    After a move autograd stores p.grad.
    """
    model = network()
    optimizer = wrap(model, steps, torch.optim.Adam, lr=0.0)
    if moves:
        model.double()
    for number in range(steps or 1):
        assert optimizer.micro_step == number
        (loss_of(model) * float(moves)).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 1
    assert optimizer.state[model[0].weight]["step"] == 1


def nested(model, optimizer) -> dict:
    return {"model": model.state_dict(), "training": {"optim": get_optimizer_state_dict(model, optimizer)}}


def save(folder, micro_batches: int) -> nn.Module:
    model, optimizer, train = settings()
    train(range(micro_batches))
    dcp.save(nested(model, optimizer), checkpoint_id=folder)
    return model


def load(folder, model, optimizer, room: bool = True) -> None:
    target = nested(model, optimizer)
    if room:
        make_room(target, folder)
    dcp.load(target, checkpoint_id=folder)
    model.load_state_dict(target["model"])
    set_optimizer_state_dict(model, optimizer, target["training"]["optim"])


#: Counted loops without frozen parameters, of which torch saves nothing, and stochastic rounding.
FOLDERS = {name: way for name, way in WAYS.items() if "manual" not in name and "inside" not in name} | {
    "stochastic": {"dtype": LOW, "accumulate_dtype": LOW, "rounding": "stochastic", "seed": 8}
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestFolder:
    """`torch.distributed.checkpoint.save` and `load` in one process."""

    @pytest.mark.sweep
    @pytest.mark.parametrize("done", [2, 4, 6])
    @pytest.mark.parametrize("before", [0, 5])
    @pytest.mark.parametrize("options", FOLDERS.values(), ids=FOLDERS)
    def test_training_resumes_bit_for_bit(self, tmp_path, options, done, before):
        """Save inside a window or at its end, and load into a new wrapper or one that is inside a window."""

        def through_folder(model, optimizer, other, resumed) -> None:
            dcp.save(nested(model, optimizer), checkpoint_id=tmp_path)
            load(tmp_path, other, resumed)

        assert_resumes(functools.partial(settings, **options), done, before, through_folder)

    @pytest.mark.parametrize("options", [{}, {"steps": None}], ids=["counted", "manual"])
    def test_training_resumes_without_a_folder(self, options):
        def directly(model, optimizer, other, resumed) -> None:
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            other.load_state_dict(model.state_dict())
            set_optimizer_state_dict(other, resumed, saved)

        assert_resumes(functools.partial(settings, **options), 6, 0, directly)

    def test_without_room_a_partial_window_is_an_error(self, tmp_path):
        save(tmp_path, 6)
        other, resumed, train_other = settings()
        train_other(range(4))
        before = copy.deepcopy(resumed.state_dict())
        with pytest.raises(ValueError, match=r"sums of 4 parameters, it holds those of 0.*make_room"):
            load(tmp_path, other, resumed, room=False)
        assert identical(before["state"], resumed.state_dict()["state"])
        assert (resumed.micro_step, resumed.num_updates) == (0, 1)

    def test_the_end_of_a_window_needs_no_room(self, tmp_path):
        save(tmp_path, 8)
        other, resumed, _ = settings()
        load(tmp_path, other, resumed, room=False)
        assert (resumed.micro_step, resumed.num_updates) == (0, 2)

    def test_make_room_takes_a_reader_and_adds_nothing_without_an_optimizer(self, tmp_path):
        target = {"model": save(tmp_path, 2).state_dict()}
        make_room(target, dcp.FileSystemReader(tmp_path))
        assert target.keys() == {"model"}

    def test_a_folder_is_exchanged_with_the_bare_optimizer(self, tmp_path):
        model, optimizer, train = settings()
        train(range(8))
        other, resumed, _ = settings()
        inner, bare = optimizer.optimizer, resumed.optimizer
        for number, (saver, loader) in enumerate([(inner, resumed), (optimizer, bare)]):
            dcp.save(nested(model, saver), checkpoint_id=tmp_path / str(number))
            load(tmp_path / str(number), other, loader)
            assert identical(inner.state_dict()["state"], bare.state_dict()["state"])

    def test_a_flattened_state_dict_holds_only_the_inner_state(self):
        """torch keeps only the keys that the live optimizer has."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer, train = settings()
        train(range(6))
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        other, resumed, _ = settings()
        set_optimizer_state_dict(other, resumed, saved, options=options)
        assert (resumed.micro_step, resumed.num_updates) == (0, 0)
        inner = optimizer.optimizer.state_dict()["state"]
        assert identical(inner, resumed.optimizer.state_dict()["state"])
