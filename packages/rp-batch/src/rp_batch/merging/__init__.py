"""Merging: align the parts of a tree and combine their leaves."""
