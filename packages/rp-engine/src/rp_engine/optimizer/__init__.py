"""Optimizer steps, which run on a separate thread, and the publication of their results to the weights."""
