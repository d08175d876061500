"""Forwards that can be run again: with the same random numbers, and with nothing that leaves a module in silence.

Recomputation runs a module's forward a second time for its backward, so both runs must give the same. `randomness`
seeds what it draws, `examination` runs it twice and compares, `sketch` keeps a few numbers of an output for later.
"""

from rp_errors import count_as_inside

from rp_recompute.attributes import Attributes, ModuleCopy, attributes_of
from rp_recompute.copies import copied
from rp_recompute.errors import ImpureLayer
from rp_recompute.examination import ExaminedLayer, examined
from rp_recompute.precision import least_precise
from rp_recompute.randomness import Habits, NewHabits, Randomness, RngConsumer, draw_seed, mix, unseeded
from rp_recompute.sketch import sketch

__version__ = "0.1.0"

count_as_inside("rp_recompute")

__all__ = [
    "Attributes",
    "ExaminedLayer",
    "Habits",
    "ImpureLayer",
    "ModuleCopy",
    "NewHabits",
    "Randomness",
    "RngConsumer",
    "attributes_of",
    "copied",
    "draw_seed",
    "examined",
    "least_precise",
    "mix",
    "sketch",
    "unseeded",
]
