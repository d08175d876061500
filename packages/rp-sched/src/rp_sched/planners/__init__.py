"""Planners: compute plans from layer costs."""
