"""Observe a model's forward: find its layers, and prove that they form a row."""
