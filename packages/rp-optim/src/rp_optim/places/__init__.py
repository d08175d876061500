"""Where an optimizer keeps its state: in memory, or on disk."""
