"""Transfers of blocks of host memory: pieces over several connections, sums, and waiting for them."""
