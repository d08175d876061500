"""`generate` of a Hugging Face model with another forward: the loop is its own, and asks for fewer rows."""

from rp_generate.fewer_rows import FewerRows
from rp_generate.generating import generated
from rp_generate.row import DividesCaches, GeneratingLayers

__version__ = "0.1.0"

__all__ = ["DividesCaches", "FewerRows", "GeneratingLayers", "generated"]
