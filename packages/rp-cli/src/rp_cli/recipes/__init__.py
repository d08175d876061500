"""Recipes: options of `roundpipe train` that fit a machine, and the configurations that they are of."""
