"""Splitting: infer the batch size of a tree and cut the tree into parts."""
