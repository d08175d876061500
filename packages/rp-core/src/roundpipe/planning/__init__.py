"""Planning: measured costs of layers to plans, plans to the tasks of a call."""
