"""The simulator: time and memory of plans and task lists."""
