"""Frozen weights in few bits: formats, the parameter that holds one, and packing a model's."""
