"""Cards by name: memory, link and dense rates, as their makers publish them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GIB = 1 << 30
# The rates that copies reach on a link of sixteen lanes, of PCIe 4 and PCIe 5; some cards have eight lanes.
_PCIE_4, _PCIE_5, _PCIE_4_X8 = 25.0, 55.0, 12.5
_GB_S_A_TFLOPS = 1008 / 165


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of device.

    `memory_bytes`: the nominal size. `link_gb_s`: 10^9 bytes a second to the device, and as many back at the same
    time. `tflops`: at most 10^12 dense bf16 operations a second, with sums in fp32. `fp8_tflops`: the same in FP8;
    None: it has none, or it is not known. `memory_gb_s`: 10^9 bytes a second of its own memory; unless it is
    known, as many for its `tflops` as an RTX 4090 has.
    """

    name: str
    memory_bytes: int
    link_gb_s: float
    tflops: float
    fp8_tflops: float | None = None
    memory_gb_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_gb_s:
            object.__setattr__(self, "memory_gb_s", self.tflops * _GB_S_A_TFLOPS)

    @property
    def fp16_sums_tflops(self) -> float:
        """The rate of fp16 products with sums in fp16: twice that of fp32 sums on GeForce cards, as makers say."""
        return 2 * self.tflops if self.is_consumer else self.tflops

    @property
    def is_consumer(self) -> bool:
        """Whether it is sold for boards with two channels of memory, rather than for workstations and servers."""
        return re.fullmatch(r"RTX [345]0\d0.*", self.name) is not None


# FP8, dense and with sums in fp32: the makers' papers on Ada (RTX 4090: 330.3), Hopper (H100: 1979) and Blackwell
# (RTX 5090: 419; B200: 4500), and data sheets of L4 and L40S. Last, memory's rate, by data sheets.
CARDS = (
    Card("RTX 3090", 24 * _GIB, _PCIE_4, 71, None, 936),
    Card("RTX 4060 Ti 16GB", 16 * _GIB, _PCIE_4_X8, 44, 88, 288),
    Card("RTX 4070 Ti SUPER", 16 * _GIB, _PCIE_4, 88, 176, 672),
    Card("RTX 4080", 16 * _GIB, _PCIE_4, 97, 195, 717),
    Card("RTX 4090", 24 * _GIB, _PCIE_4, 165, 330, 1008),
    Card("RTX 5090", 32 * _GIB, _PCIE_5, 210, 419, 1792),
    Card("RTX A6000", 48 * _GIB, _PCIE_4, 155, None, 768),
    Card("RTX 6000 Ada", 48 * _GIB, _PCIE_4, 364, 728, 960),
    Card("L4", 24 * _GIB, _PCIE_4_X8, 121, 242, 300),
    Card("L40S", 48 * _GIB, _PCIE_4, 362, 733, 864),
    Card("A10", 24 * _GIB, _PCIE_4, 125, None, 600),
    Card("A100 40GB", 40 * _GIB, _PCIE_4, 312, None, 1555),
    Card("A100 80GB", 80 * _GIB, _PCIE_4, 312, None, 2039),
    Card("H100", 80 * _GIB, _PCIE_5, 989, 1979, 3350),
    Card("H100 PCIe", 80 * _GIB, _PCIE_5, 756, 1513, 2039),
    Card("H200", 140 * _GIB, _PCIE_5, 989, 1979, 4800),
    Card("B200", 180 * _GIB, _PCIE_5, 2250, 4500, 8000),
)


def card_named(name: str) -> Card | None:
    """Return the card with this name, ignoring case, spaces and maker; None if the table has none.

    A driver's names also have the form and the memory, as in ``NVIDIA A100-SXM4-80GB``.

    >>> card_named("NVIDIA GeForce rtx4090").memory_bytes >> 30
    24
    >>> card_named("NVIDIA H100 80GB HBM3").name, card_named("NVIDIA H100 PCIe").name
    ('H100', 'H100 PCIe')
    >>> card_named("4090").name
    'RTX 4090'
    >>> card_named("TPU") is None
    True
    """
    names = {_plain(card.name) + memory: card for card in CARDS for memory in ("", f"{card.memory_bytes >> 30}gb")}
    wanted = _plain(name)
    # Of most cards the table has one form.
    return names.get(wanted) or names.get(wanted.replace("pcie", ""))


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|generation|sxm\d?|hbm\d?e?|[^a-z0-9]", "", name.lower())
