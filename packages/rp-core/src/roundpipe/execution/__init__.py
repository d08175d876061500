"""One call under way: its tasks and what they hand to each other."""
