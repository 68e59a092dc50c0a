"""Real text as bytes, and a small transformer that predicts the next one."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT = 64
MICRO_BATCH_SIZE = 8


def load_text(path: Path | None = None, limit: int = 4_000_000) -> Tensor:
    """The bytes of `path`, or of the Python standard library's sources: uint8 [at most `limit`].

    Raises ValueError if there are fewer bytes than one micro-batch needs.
    """
    paths = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(p.read_bytes() for p in paths)[:limit]
    if len(text) < CONTEXT + 2:
        raise ValueError(f"text must hold at least {CONTEXT + 2} bytes; {path or 'it'} holds {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def micro_batch(
    text: Tensor, seed: int, device: torch.device, size: int = MICRO_BATCH_SIZE, context: int = CONTEXT
) -> tuple[Tensor, Tensor]:
    """Random windows of `text` and the same shifted by one: two int64 [size, context]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].to(device, torch.int64)
    return window[:, :-1], window[:, 1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class ByteTransformer(nn.Module):
    """Decoder-only transformer over 256 byte values, of at most `context` positions."""

    def __init__(self, width: int = 256, layers: int = 3, heads: int = 4, context: int = CONTEXT) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        for weight in (self.bytes.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, length, 256]."""
        return self.head(self.blocks(self.bytes(x) + self.positions.weight[: x.shape[1]]))
