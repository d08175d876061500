"""Look up formats by name."""

from __future__ import annotations

from typing import Any

from rp_packing.format import Format
from rp_packing.formats.fp8 import Fp8Tiles
from rp_packing.formats.fp8_rows import Fp8Rows
from rp_packing.formats.int8 import Int8
from rp_packing.formats.mxfp4 import Mxfp4
from rp_packing.formats.nf4 import Nf4

FORMATS = ("fp8", "fp8-rows", "int8", "nf4", "mxfp4")


def format_of(name: Any, *, transposed: bool = False) -> Format:
    """Return the format of this name. `transposed`: for a weight whose last dimension is that of its outputs.

    >>> format_of("nf4")
    Nf4(name='nf4')

    Raises `ValueError` if there is none.
    """
    match name:
        case "fp8":
            return Fp8Tiles()
        case "fp8-rows":
            return Fp8Rows()
        case "int8":
            return Int8()
        case "nf4":
            return Nf4()
        case "mxfp4":
            return Mxfp4(transposed=transposed)
        case _:
            raise ValueError(f"the format must be one of {', '.join(FORMATS)}, but is {name!r}")
