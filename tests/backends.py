"""Finds the backends that the tests can run here."""

import torch


def cpu_backends() -> list[str]:
    """Return the backends that can run on CPU tensors in this process."""
    from fusedacc.kernels import registry

    device = torch.device("cpu")
    return [
        name
        for name in registry.NAMES
        if registry.obstacle(name, device, torch.float32, torch.float32) is None
    ]
