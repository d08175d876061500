"""Rows of layers made from a model: its layers, and the code around them run on skeletons of the model."""
