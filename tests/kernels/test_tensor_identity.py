"""A tensor is recognised without keeping it alive, with and without the native module."""

import pytest
import torch

from fusedacc.kernels import tensor_identity

CLASSES = {"native": tensor_identity.TensorIdentity, "python": tensor_identity._TensorIdentity}


def sparse():
    return torch.eye(3).to_sparse()


@pytest.fixture(params=CLASSES)
def identity_of(request):
    return CLASSES[request.param]


@pytest.mark.parametrize("make", [lambda: torch.ones(3), sparse], ids=["dense", "sparse"])
def test_only_the_same_tensor_is_recognised(identity_of, make):
    tensor = make()
    identity = identity_of(tensor)
    assert identity.refers_to(tensor)
    assert not identity.refers_to(make())
    del tensor
    assert not any(identity.refers_to(make()) for _ in range(100))  # some may get the same address


def test_tensors_can_be_swapped(identity_of):
    tensor, other = torch.ones(3), torch.zeros(3)
    identity = identity_of(tensor)
    torch.utils.swap_tensors(tensor, other)
    assert identity.refers_to(other)
    assert not identity.refers_to(tensor)
