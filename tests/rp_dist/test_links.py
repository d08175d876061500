"""The links that tests make worse: a limited rate is kept. What a cut one does is in `test_faults`."""

from __future__ import annotations

import pytest
from processes import told

LIMITED = """
import links
with Machines.open(connections=2, timeout_s=20) as machines:
    block = torch.zeros(4_000_000, dtype=torch.uint8)
    found = links.limit(0.02, among=2)
    machines.exchange(0)
    begin = time.monotonic()
    machines.gather(block, 0, tag=0).wait()
    seconds = max(machines.exchange(time.monotonic() - begin))
    tell([found >= 3, seconds])
"""


@pytest.mark.slow
def test_a_limited_link_carries_no_more_than_its_rate() -> None:
    for is_found, seconds in told(LIMITED, 2):
        assert is_found
        # 4 MB at 20 MB/s; the kernel lets a little pass at once.
        assert seconds > 0.1
