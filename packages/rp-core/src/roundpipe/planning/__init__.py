"""From measured costs to the tasks of a call."""
