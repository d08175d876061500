"""A training job of the command: its text, its model, and its devices."""
