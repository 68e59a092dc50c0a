"""The Triton backend: sizes, launches, uploads, and the end of a norm."""

import pytest
import torch
from cases import copies, random_lists, random_tensor

from fusedacc import functional
from fusedacc.kernels import registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = registry.obstacle("triton", torch.device(DEVICE), torch.float32, torch.float32)
if PROBLEM is not None:
    pytest.skip(f"the triton backend cannot run here: {PROBLEM}", allow_module_level=True)

from fusedacc.kernels.triton import backend, kernels  # noqa: E402  (only where Triton can be imported)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_sizes_around_blocks_and_chunks(offset, generator):
    block, chunk = kernels.BLOCK, kernels.CHUNK
    sizes = [1, 127, 128, block - 1, block, block + 1, chunk + 1]
    if offset != 1:  # misaligned tensors need small steps, which are slow to interpret
        sizes += [chunk - 1, chunk, 2 * chunk + block + 3]
    for pair in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]:
        accumulators, gradients, guards = [], [], []
        for size in sizes:
            room = torch.zeros(size + offset + 1, dtype=pair[1], device=DEVICE)
            guards.append(room)
            accumulators.append(room[offset : offset + size])
            gradients.append(random_tensor((size + offset,), pair[0], generator, device=DEVICE)[offset:])
        functional.scale_accumulate_(accumulators, gradients, backend="triton")
        for room, accumulator, gradient in zip(guards, accumulators, gradients, strict=True):
            assert torch.equal(accumulator, gradient.to(pair[1]))
            assert not torch.cat([room[-1:], room[:offset]]).any()


def test_hundreds_of_tensors_need_one_launch_per_pair(monkeypatch, generator):
    launches = []
    launch = backend._Group.run

    def counted(group, *arguments, **options):
        launches.append(len(group.accumulators))
        launch(group, *arguments, **options)

    monkeypatch.setattr(backend._Group, "run", counted)
    pairs = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
    shapes = [(index % 5,) for index in range(150)]
    accumulators, gradients = random_lists(pairs, shapes, generator, device=DEVICE)
    expected = copies(accumulators)
    functional.scale_accumulate_(accumulators, gradients, backend="triton")
    functional.scale_accumulate_(expected, gradients, backend="eager")
    assert all(map(torch.equal, accumulators, expected))
    assert launches == [150, 150]


def test_a_plan_uploads_only_changes(monkeypatch):
    uploads = []
    upload = backend.upload

    def counted(words, *others):
        uploads.append(len(words))
        return upload(words, *others)

    monkeypatch.setattr(backend, "upload", counted)
    accumulators = [torch.zeros(8, device=DEVICE) for _ in range(3)]
    gradients = [torch.ones(8, device=DEVICE) for _ in range(3)]
    plan = functional.prepare(accumulators, backend="triton")
    plan(gradients, 0.5)
    assert uploads == [2 * 3 + 2]  # address and flags of each gradient, the scale and beta
    plan(gradients, 0.5)
    assert len(uploads) == 1
    plan(gradients, 0.25)
    plan(gradients, 0.25, overwrite=[False, True, False])
    plan([gradient.clone() for gradient in gradients], 0.25)
    assert len(uploads) == 4
    scale = torch.tensor(2.0, device=DEVICE)
    plan(gradients, scale)
    scale.fill_(3.0)
    plan(gradients, scale)  # read on the device, at the time of the call
    assert len(uploads) == 5
    assert [tensor[0].item() for tensor in accumulators] == [6.75, 5.5, 6.75]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_many_partial_norms_give_one_norm(norm_type, monkeypatch, generator):
    chunk = kernels.CHUNK
    monkeypatch.setattr(kernels, "MOST_PARTIALS", chunk)
    for count in (chunk, chunk + 1, 3 * chunk + 5):
        found = torch.rand(count, dtype=torch.float64, generator=generator).to(DEVICE)
        norm, bad = backend._finish_norm([found[:7].clone(), found[7:]], norm_type, torch.float64)
        expected = torch.linalg.vector_norm(found, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        assert bad.item() == 0
        again, _ = backend._finish_norm([found], norm_type, torch.float64)
        assert torch.equal(norm, again)
        found[count - 2] = torch.inf
        norm, bad = backend._finish_norm([found], norm_type, torch.float64)
        assert (norm.item(), bad.item()) == (torch.inf, 1)
