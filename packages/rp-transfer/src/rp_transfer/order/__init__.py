"""The order of access to memory: turns, chunked copies, and lifetimes."""
