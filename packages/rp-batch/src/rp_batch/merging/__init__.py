"""Merging the parts of a tree: how they line up, and how their values become one."""
