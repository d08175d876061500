"""Checkpoints: a training's whole state in a folder that is whole or not there."""
