"""How large a problem may be, and why: what is larger is refused before any work starts."""

from typing import NamedTuple


class Bound(NamedTuple):
    """The most that a number may be; `reason` is the end of an error's sentence."""

    most: int
    reason: str


LAYERS = Bound(4096, "since a planner compares all pairs of layers")
DEVICES = Bound(1024, "since the choice of a device looks at all of them")
MICROBATCHES = Bound(16_384, "since every plan that is tried is played for all of them")
# Layers times microbatches: 1,000 layers with 1,024 microbatches; a plan of these takes minutes.
LAYER_RUNS = Bound(2**20, "since every plan that is tried is played; merge layers or take fewer microbatches")
# Microbatches that go through stages. A timeline keeps a few hundred bytes of each: some GB.
STEPS = Bound(10_000_000, "since a timeline holds each of them; play fewer calls")
TASKS = Bound(10_000_000, "since a list holds each of them; take fewer stages or groups")
GAPS = Bound(10_000_000, "since the answer has an entry for each")
CALLS = Bound(1_000_000, "since each is played; the pace of the first hundreds is that of all")
COLUMNS = Bound(10_000, "since a chart is for the eye")
BYTES = Bound(2**63 - 1, "since no machine addresses more")
# 30,000 years: sums of times, of all layers, microbatches and calls, stay finite.
MOST_MS = 1e15
# A byte a second: times on the links stay finite.
LEAST_GB_S = 1e-9
