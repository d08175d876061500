"""Settings of a model or a call: run configurations and execution plans."""
