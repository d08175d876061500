"""Rows of layers made from a model: its own layers, with the code around them run on skeletons of the model."""
