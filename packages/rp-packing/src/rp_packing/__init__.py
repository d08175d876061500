"""Weights in few bits: frozen ones that are packed, with their formats, and products of linear layers in FP8."""

from rp_packing.errors import KernelWarning
from rp_packing.expansion import Expansions, PackedTwin
from rp_packing.format import Format
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.frozen import PackedBytes, pack_frozen, unpack_frozen
from rp_packing.kernel.choice import refusal
from rp_packing.layout import CodeLayout
from rp_packing.products.decision import LEAST_SAVED, Decision, candidates, decide
from rp_packing.products.layers import Fp8Choice, Fp8Linear, become, choose, codes_bytes
from rp_packing.products.only_multiplied import by_name, only_multiplied, reads_codes_alone
from rp_packing.products.recipe import Fp8
from rp_packing.products.scaled import refusal as fp8_refusal
from rp_packing.products.timing import LinearShape, run_linear, shapes_of, time_products
from rp_packing.rows import Rows
from rp_packing.services import Services, lend
from rp_packing.weight import PackedWeight, as_parameter, expand, expansion_bytes, packed_weights

__version__ = "0.1.0"

# Its name in 0.1.0, where the layout of a block in memory has the same one.
Layout = CodeLayout

__all__ = [
    "FORMATS",
    "LEAST_SAVED",
    "CodeLayout",
    "Decision",
    "Expansions",
    "Format",
    "Fp8",
    "Fp8Choice",
    "Fp8Linear",
    "KernelWarning",
    "LinearShape",
    "PackedBytes",
    "PackedTwin",
    "PackedWeight",
    "Rows",
    "Services",
    "as_parameter",
    "become",
    "by_name",
    "candidates",
    "choose",
    "codes_bytes",
    "decide",
    "expand",
    "expansion_bytes",
    "format_of",
    "fp8_refusal",
    "lend",
    "only_multiplied",
    "pack_frozen",
    "packed_weights",
    "reads_codes_alone",
    "refusal",
    "run_linear",
    "shapes_of",
    "time_products",
    "unpack_frozen",
]
