"""Numbers of a window that travel behind its gradients and come back as their exact sum over the ranks.

They are sent as binary digits, one element each: a sum of few ones is exact in every dtype on the wire, in
whatever order the ranks are added, where a sum of weights would be rounded differently here and there.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Binary digits before and behind the point.
WHOLE, FRACTION = 62, 62
#: Elements that one number takes.
DIGITS = WHOLE + FRACTION
#: Ranks whose digits a dtype adds up exactly.
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def encode(value: float | Tensor, device: torch.device) -> Tensor:
    """The digits of a number of at least 0, the lowest first: zeros and ones of shape (DIGITS,), int64.

    A number on a device is not waited for; where it is nan or below 0 its digits mean nothing.
    """
    number = torch.as_tensor(value, dtype=torch.float64, device=device)
    whole = number.floor()
    parts = torch.stack([(number - whole) * 2.0**FRACTION, whole]).to(torch.int64)
    return ((parts.unsqueeze(1) >> torch.arange(WHOLE, device=device)) & 1).flatten()


def decode(digits: Tensor) -> Tensor:
    """The number whose digits, added up over the ranks, are these: 0-dim float64 on their device."""
    exponents = torch.arange(-FRACTION, WHOLE, dtype=torch.float64, device=digits.device)
    return (digits.to(torch.float64) * torch.exp2(exponents)).sum()
