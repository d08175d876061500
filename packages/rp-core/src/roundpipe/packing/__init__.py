"""Frozen weights in few bits: the formats, the packed parameter, and functions that pack a model's weights."""
