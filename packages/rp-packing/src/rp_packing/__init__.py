"""Frozen weights in few bits: the formats, the packed parameter, and functions that pack a model's weights."""

from rp_packing.errors import KernelWarning
from rp_packing.expansion import Expansions, PackedTwin
from rp_packing.format import Format
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.frozen import PackedBytes, pack_frozen, unpack_frozen
from rp_packing.kernel.choice import refusal
from rp_packing.layout import CodeLayout
from rp_packing.services import Services, lend
from rp_packing.weight import PackedWeight, as_parameter, expand, expansion_bytes, packed_weights

__version__ = "0.1.0"

# Its name in 0.1.0, where the layout of a block in memory has the same one.
Layout = CodeLayout

__all__ = [
    "FORMATS",
    "CodeLayout",
    "Expansions",
    "Format",
    "KernelWarning",
    "PackedBytes",
    "PackedTwin",
    "PackedWeight",
    "Services",
    "as_parameter",
    "expand",
    "expansion_bytes",
    "format_of",
    "lend",
    "pack_frozen",
    "packed_weights",
    "refusal",
    "unpack_frozen",
]
