"""Planning: from measured costs of layers to plans, and from plans to the tasks of a call."""
