"""Numbers of a window that travel behind its gradients and come back as their exact sum over the ranks.

They are sent as binary digits, one element each: a sum of few ones is exact in every dtype on the wire, in
whatever order the ranks are added, where a sum of weights would be rounded differently here and there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Binary digits before and behind the point.
WHOLE, FRACTION = 62, 62
#: Elements that one number takes.
DIGITS = WHOLE + FRACTION
#: Ranks whose digits a dtype adds up exactly.
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def encode(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """The digits of numbers of at least 0, each one's lowest first: zeros and ones, int64 [values * DIGITS].

    A number on a device is not waited for; where it is nan or below 0 its digits mean nothing.
    """
    if any(isinstance(value, Tensor) for value in values):
        each = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        numbers = torch.stack(each)
    else:
        numbers = torch.tensor(values, dtype=torch.float64, device=device)
    whole = numbers.floor()
    parts = torch.stack([(numbers - whole) * 2.0**FRACTION, whole], dim=1).to(torch.int64)
    return ((parts.unsqueeze(-1) >> torch.arange(WHOLE, device=device)) & 1).flatten()


def decode(digits: Tensor) -> Tensor:
    """The number whose digits, added up over the ranks, are these: 0-dim float64 on their device."""
    exponents = torch.arange(-FRACTION, WHOLE, dtype=torch.float64, device=digits.device)
    return (digits.to(torch.float64) * torch.exp2(exponents)).sum()
