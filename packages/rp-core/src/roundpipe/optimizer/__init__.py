"""Optimizer steps on their own thread."""
