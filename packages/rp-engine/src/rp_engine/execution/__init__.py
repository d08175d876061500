"""Execution of one call: its tasks and the data passed between them."""
