"""Whether this PyTorch's Adagrad updates parameters that were added after it was made."""

import torch


def _grows() -> bool:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    inner = torch.optim.Adagrad([first])
    inner.add_param_group({"params": [second]})
    second.grad = torch.ones(1)
    try:
        inner.step()
    except KeyError:
        return False
    return True


#: False with PyTorch 2.10 and 2.11, whose constructor makes the state of all parameters.
GROWS = _grows()
