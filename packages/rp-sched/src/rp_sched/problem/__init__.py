"""The planning problem as data: costs, limits, plans and tasks."""
