"""Splitting a tree: what the batch is, and how it is cut."""
