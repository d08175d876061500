"""Checkpoints: the whole state of a training in a folder, which is either complete or absent."""
