"""The decoder that all engines of `train.py` train: one `nn.Sequential`, in the sizes of well-known models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Hidden states, the rotary tables, and perhaps the tokens.
Carry = tuple[Tensor, ...]
_CHUNK = 4096


@dataclass(frozen=True)
class Size:
    """The shape of a decoder; `tied` heads use the embedding's weight, `head_norm` is Qwen3's norm of q and k."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_norm: bool
    theta: float
    head: int = 128

    def matmul_parameters(self) -> int:
        """The parameters that each token is multiplied by."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward without recomputation; attention sees half of the sequence on average."""
        attention = 2 * self.layers * sequence * self.heads * self.head
        return 6 * self.matmul_parameters() + 3 * attention


SIZES = {
    "tiny": Size(4, 64, 192, 4, 2, 512, True, True, 1e6, head=16),
    "qwen3-1.7b": Size(28, 2048, 6144, 16, 8, 151936, True, True, 1e6),
    "qwen3-4b": Size(36, 2560, 9728, 32, 8, 151936, True, True, 1e6),
    "qwen3-8b": Size(36, 4096, 12288, 32, 8, 151936, False, True, 1e6),
    "llama-3.1-8b": Size(32, 4096, 14336, 32, 8, 128256, False, False, 5e5),
}


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Embedding(nn.Module):
    """Tokens to hidden states, and the rotary tables that every block reads; perhaps the tokens, for the loss."""

    def __init__(self, size: Size, *, hands_on_tokens: bool) -> None:
        super().__init__()
        self.hands_on_tokens = hands_on_tokens
        self.weight = nn.Parameter(torch.empty(size.vocabulary, size.hidden).normal_(std=0.02))
        self.head, self.theta = size.head, size.theta

    def forward(self, tokens: Tensor) -> Carry:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = torch.arange(0, self.head, 2, device=tokens.device, dtype=torch.float32) / self.head
        angles = torch.outer(positions, self.theta**-rates).repeat(1, 2)
        hidden = functional.embedding(tokens, self.weight)
        tables = angles.cos().to(hidden.dtype)[None], angles.sin().to(hidden.dtype)[None]
        return (hidden, *tables, tokens) if self.hands_on_tokens else (hidden, *tables)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.q = nn.Linear(size.hidden, size.heads * size.head, bias=False)
        self.k = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.v = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.o = nn.Linear(size.heads * size.head, size.hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(size.head) if size.head_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _turn(self.q_norm(self._heads(self.q(x))), cos, sin)
        k = _turn(self.k_norm(self._heads(self.k(x))), cos, sin)
        v = self._heads(self.v(x))
        seen = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o(seen.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-high, low), -1) * sin[:, :, None]


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(size.hidden), RMSNorm(size.hidden)
        self.attention = Attention(size)
        self.gate = nn.Linear(size.hidden, size.inner, bias=False)
        self.up = nn.Linear(size.hidden, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, carry: Carry) -> Carry:
        x, cos, sin, *rest = carry
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed)), cos, sin, *rest


class Head(nn.Module):
    """The last norm, and logits."""

    def __init__(self, size: Size, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = RMSNorm(size.hidden)
        if weight is None:
            weight = nn.Parameter(torch.empty(size.vocabulary, size.hidden).normal_(std=0.02))
        self.weight = weight

    def forward(self, carry: Carry) -> Tensor:
        return functional.linear(self.norm(carry[0]), self.weight)


class LossHead(Head):
    """The loss itself, as a sum: of a long sequence, the logits of all tokens would be larger than all else."""

    @torch.compiler.disable
    def forward(self, carry: Carry) -> Tensor:
        rows, targets = carry[0][:, :-1].flatten(0, 1), carry[3][:, 1:].flatten()
        losses = [
            checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(rows.split(_CHUNK), targets.split(_CHUNK), strict=True)
        ]
        return torch.stack(losses).sum()

    def _loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(self.norm(rows), self.weight)
        return functional.cross_entropy(logits.float(), targets, reduction="sum")


def decoder(
    size: Size, seed: int = 0, *, with_loss: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    """The model on the CPU, up to the logits or, `with_loss`, to the loss of all tokens.

    Its weights are drawn with `seed`, on a GPU where there is one.
    """
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            embedding = Embedding(size, hands_on_tokens=with_loss).cpu()
            blocks = [_shrunk(Block(size), size).cpu() for _ in range(size.layers)]
            head = (LossHead if with_loss else Head)(size, embedding.weight if size.tied else None).cpu()
        return nn.Sequential(embedding, *blocks, head)
    finally:
        torch.set_default_dtype(before)


def _shrunk(block: Block, size: Size) -> Block:
    # As GPT-2 does: so many residual branches add up to no more than one.
    with torch.no_grad():
        for linear in (block.attention.o, block.down):
            linear.weight.div_((2 * size.layers) ** 0.5)
    return block


def batches(size: Size, batch: int, sequence: int, seed: int = 1) -> Callable[[], Tensor]:
    """Random tokens, the same for every engine: (batch, sequence) of the next step at each call."""
    generator = torch.Generator().manual_seed(seed)
    # Few tokens of the vocabulary, so that there is something to learn in some steps.
    return lambda: torch.randint(min(1000, size.vocabulary), (batch, sequence), generator=generator)
