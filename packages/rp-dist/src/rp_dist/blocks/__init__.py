"""Blocks of host memory under way: pieces over several connections, sums, and what waits for them."""
