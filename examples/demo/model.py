"""Loads text as bytes or words, and defines a small transformer that predicts the next one."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT = 64
MICRO_BATCH_SIZE = 8
#: The size of the vocabulary: the most frequent words, and one entry for all other words.
VOCABULARY = 32_768
UNKNOWN = 0
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


def load_text(path: Path | None = None, limit: int = 4_000_000) -> Tensor:
    """Return at most `limit` bytes of a file, or of the sources of Python's standard library, as uint8.

    Raises ValueError if these are fewer than one micro-batch needs.
    """
    paths = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(p.read_bytes() for p in paths)[:limit]
    _check_length(len(text), "bytes", path)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def load_words(path: Path | None = None, vocabulary: int = VOCABULARY) -> tuple[Tensor, int]:
    """Return the words of a file, or of Python's standard library with its packages, as int32 numbers, and
    the size of the vocabulary.

    A word is a name, a number, a punctuation character or a newline. The `vocabulary - 1` most frequent words
    have the numbers from 1 on. All other words have the number `UNKNOWN`. Raises ValueError if there are
    fewer words than one micro-batch needs.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path] if path else [p for p in sorted(library.rglob("*.py")) if _is_library(p, library)]
    words = [word for p in paths for word in re.findall(r"\w+|[^\w\s]|\n", p.read_text("utf-8", "replace"))]
    _check_length(len(words), "words", path)
    frequent = Counter(words).most_common(vocabulary - 1)
    numbers = {word: UNKNOWN + 1 + i for i, (word, _) in enumerate(frequent)}
    text = torch.tensor([numbers.get(word, UNKNOWN) for word in words], dtype=torch.int32)
    return text, len(numbers) + 1


def _is_library(path: Path, library: Path) -> bool:
    return not NOT_THE_LIBRARY.intersection(path.relative_to(library).parts)


def _check_length(length: int, unit: str, path: Path | None) -> None:
    if length < CONTEXT + 2:
        raise ValueError(f"text must hold at least {CONTEXT + 2} {unit}; {path or 'it'} holds {length}")


def micro_batch(
    text: Tensor, seed: int, device: torch.device, size: int = MICRO_BATCH_SIZE, context: int = CONTEXT
) -> tuple[Tensor, Tensor]:
    """Return random pieces of `text`, and the same shifted by one: two int64 tensors [size, context]."""
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


class Transformer(nn.Module):
    """A decoder-only transformer. The weights of its embedding and its head are not tied.

    Args:
        width: the size of the hidden states.
        layers: the number of blocks.
        heads: the number of attention heads.
        context: the maximum length of a sequence.
        vocabulary: the number of different bytes or words.
    """

    def __init__(
        self, width: int = 256, layers: int = 3, heads: int = 4, context: int = CONTEXT, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] for int64 tokens [batch, length]."""
        return self.head(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]]))
