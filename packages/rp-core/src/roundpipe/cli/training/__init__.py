"""One training job: its text, its model, its machine."""
