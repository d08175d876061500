"""Optimizer steps, which run on a thread of their own, and their results in the weights."""
