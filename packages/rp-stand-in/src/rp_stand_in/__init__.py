"""A module in the place of another: its attributes, names and state dicts are that one's, current at any moment.

`stand_in` is the module, `names` finds tensors by the user's own names, `current` makes state dicts wait for
steps, and `narrow_adapters` gives them the values of adapters that devices have in fewer bits.
"""

from rp_errors import count_as_inside

from rp_stand_in.current import Publisher, as_it_is, publish_first
from rp_stand_in.names import renamed
from rp_stand_in.narrow_adapters import NarrowAdapters, narrowed
from rp_stand_in.stand_in import StandIn

__version__ = "0.1.0"

count_as_inside("rp_stand_in")

__all__ = [
    "NarrowAdapters",
    "Publisher",
    "StandIn",
    "as_it_is",
    "narrowed",
    "publish_first",
    "renamed",
]
