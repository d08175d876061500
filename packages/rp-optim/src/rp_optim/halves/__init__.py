"""Masters in halves: a 16-bit weight that is the upper half of its fp32 master, and the remainder."""
