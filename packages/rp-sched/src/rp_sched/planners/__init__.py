"""Planners: from costs to plans."""
