"""What of a model's products may be in FP8, and the time that this saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rp_packing import LEAST_SAVED, Fp8, choose, codes_bytes, only_multiplied
from rp_trainer.errors import Refused
from torch import nn

from rp_estimate.machine.cards import Card

# The part of what FP8's rate has beyond bf16's that products reach; the part of a card's bf16 rate that they reach
# in bf16; and how many bytes a cast moves for each number of an input or a gradient. Measured on an H100, where
# this is right within 6 % for the linear layers of 1.7B and 8B (benchmarks/results/performance.md).
REACHED = 0.68
PRODUCTS = 0.75
CAST_BYTES = 6


@dataclass(frozen=True)
class Fp8Share:
    """The weights of each part of a row that linear layers multiply in FP8; none for a model that does not.

    >>> share = Fp8Share.of([nn.Linear(32, 16, dtype=torch.bfloat16), nn.Linear(32, 8)])
    >>> share.forward_flops(0), share.backward_flops(0), share.forward_flops(1)
    (1024, 2048, 0)
    """

    weights: tuple[tuple[torch.Tensor, ...], ...]
    # The ids of those that travel as codes, of which the host has these, too.
    coded: frozenset[int] = frozenset()

    @classmethod
    def of(cls, modules: Sequence[nn.Module], *, travels: bool = True) -> Fp8Share:
        """Return the share of a row's parts. `travels`: trained weights travel as codes where they can."""
        choice = choose(modules, Fp8())
        weights = tuple(
            tuple(module.get_parameter(f"{name}.weight".lstrip(".")) for name in names)
            for module, names in zip(modules, choice.chosen, strict=True)
        )
        trained = {id(one) for part in weights for one in part if one.requires_grad and travels}
        return cls(weights, only_multiplied(modules, choice) & trained)

    def _of(self, part: int) -> tuple[torch.Tensor, ...]:
        return self.weights[part] if self.weights else ()

    def forward_flops(self, part: int) -> int:
        """Operations of a part's forward, for a token."""
        return sum(2 * one.numel() for one in self._of(part))

    def backward_flops(self, part: int) -> int:
        """Operations of its backward: gradients of inputs, and of trained weights."""
        return sum(2 * one.numel() * (2 if one.requires_grad else 1) for one in self._of(part))

    def codes_bytes(self, part: int) -> int:
        """Bytes of its weights' codes on a device, beside those that have come."""
        return sum(
            codes_bytes(one, backward=True) - (codes_bytes(one, backward=False) if id(one) in self.coded else 0)
            for one in self._of(part)
        )

    def pays(self, card: Card) -> bool:
        """Return whether ``compute="auto"`` would choose FP8 by a card's rates."""
        if not self.weights or card.fp8_tflops is None:
            return False
        parts = range(len(self.weights))
        took = sum(self.forward_flops(part) + self.backward_flops(part) for part in parts) * _product_ms(card)
        saved = sum(self.saved_forward_ms(part, card) + self.saved_backward_ms(part, card) for part in parts)
        return saved >= LEAST_SAVED * took > 0

    def saved_forward_ms(self, part: int, card: Card) -> float:
        """Return how much sooner a part's forward is done in FP8, for a token; below zero if casts take longer.

        Raises `Refused` for a card without such products.
        """
        given = sum(one.shape[1] for one in self._of(part))
        return self._saved_ms(card, self.forward_flops(part), given)

    def saved_backward_ms(self, part: int, card: Card) -> float:
        """Return the same of its backward."""
        gradients = sum(one.shape[0] for one in self._of(part))
        return self._saved_ms(card, self.backward_flops(part), gradients)

    def _saved_ms(self, card: Card, flops: int, casts: int) -> float:
        if not self.weights:
            return 0.0
        if card.fp8_tflops is None:
            raise Refused(
                f"--compute fp8: {card.name} has no products in FP8, or their rate is not known; omit it, or "
                "describe the GPU, as in --gpu memory=24GB,link=25,tflops=165,fp8=330"
            )
        faster = 1 + REACHED * (card.fp8_tflops / card.tflops - 1)
        return flops * _product_ms(card) * (1 - 1 / faster) - casts * CAST_BYTES / (card.memory_gb_s * 1e6)


def _product_ms(card: Card) -> float:
    """The milliseconds of one operation of a product in bf16."""
    return 1 / (PRODUCTS * card.tflops * 1e9)
