"""Convolutions with `keep_casts=True` give plain PyTorch's bits, with one cast per window."""

import copy

import pytest
import torch
from kept_casts import BF16, FP16, autocast, casts_of, make
from loops import assert_same_gradients
from torch import nn

LAYERS = (
    nn.Conv1d(4, 6, 3),
    nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"),
    nn.Conv3d(4, 6, 2, dilation=2, groups=2),
    nn.ConvTranspose1d(4, 6, 3, stride=2),
    nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False),
    nn.ConvTranspose3d(4, 6, 2, padding=1),
)


@pytest.mark.parametrize("index", range(len(LAYERS)))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_outputs_and_gradients_have_plain_pytorchs_bits(index, dtype):
    layer = LAYERS[index]
    model, optimizer = make(lambda: nn.Sequential(copy.deepcopy(layer)), steps=None)
    twin = copy.deepcopy(model)
    for _ in range(2):
        inputs = [torch.randn(2, 4, *(7,) * len(layer.kernel_size), requires_grad=True)]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        outputs = []
        for net, x in zip((model, twin), inputs, strict=True):
            with autocast(dtype=dtype):
                outputs.append(net(x))
            outputs[-1].float().square().sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert len(casts_of(optimizer)) == 1
    assert_same_gradients(model, twin, rtol=0, atol=0)


def test_output_size_and_errors_equal_plain_pytorchs():
    model, _optimizer = make(lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 3, stride=2)))
    twin = copy.deepcopy(model)
    x = torch.randn(1, 2, 5, 5)
    with autocast():
        assert torch.equal(model[0](x, output_size=[12, 12]), twin[0](x, output_size=[12, 12]))
        for bad in (torch.randn(1, 3, 5, 5), x.double()):
            errors = []
            for net in (model, twin):
                with pytest.raises(RuntimeError) as caught:
                    net(bad)
                errors.append(str(caught.value))
            assert errors[0] == errors[1]
        with pytest.raises(ValueError, match="output size"):
            model[0](x, output_size=[40, 40])


def test_other_forwards_are_left_alone():
    class Doubled(nn.Conv1d):
        def forward(self, input):
            return 2 * super().forward(input)

    class Shifted(nn.Conv1d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight, bias) + 1

    def build():
        normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 1))
        return nn.Sequential(Doubled(2, 2, 1), Shifted(2, 2, 1), normed)

    model, optimizer = make(build)
    twin = copy.deepcopy(model)
    x = torch.randn(1, 2, 3)
    with autocast():
        for _ in range(2):
            assert torch.equal(model(x), twin(x))
    assert len(casts_of(optimizer)) == 1
