"""The engine of one model: its calls, steps, and host state between them."""
