"""One model's calls and steps, in the order of their launch."""
