"""Upper bounds on problem sizes; larger problems are refused before any work starts."""

from typing import NamedTuple


class Bound(NamedTuple):
    """The largest allowed number. `reason`: a clause for the error message."""

    most: int
    reason: str


LAYERS = Bound(4096, "since a planner compares all pairs of layers")
DEVICES = Bound(1024, "since choosing a device looks at all of them")
MICROBATCHES = Bound(16_384, "since every plan that is tried is simulated for all of them")
# Layers times microbatches: 1,000 layers with 1,024 microbatches; a plan of these takes minutes.
LAYER_RUNS = Bound(2**20, "since every plan that is tried is simulated; merge layers or use fewer microbatches")
# A step is one microbatch in one stage. A timeline stores a few hundred bytes for each, some GB in total.
STEPS = Bound(10_000_000, "since a timeline stores each of them; simulate fewer calls")
TASKS = Bound(10_000_000, "since a list stores each of them; use fewer stages or groups")
GAPS = Bound(10_000_000, "since the result has an entry for each")
CALLS = Bound(1_000_000, "since each is simulated; the first hundreds show the steady state")
COLUMNS = Bound(10_000, "since wider charts cannot be read")
BYTES = Bound(2**63 - 1, "since no machine addresses more")
# About 30,000 years, so that sums of times over all layers, microbatches and calls stay finite.
MOST_MS = 1e15
# One byte per second, so that transfer times stay finite.
LEAST_GB_S = 1e-9
