"""What a checkpoint asks of a model: its state between two steps, its names in files, and facts of its calls."""
