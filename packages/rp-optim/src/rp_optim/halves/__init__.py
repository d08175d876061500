"""Masters in halves: a 16-bit weight that is the upper half of its master, and the remainder beside it."""
