"""Merging: aligning the parts of a tree and combining their leaves."""
