"""Checks of layers beside their outputs: what they write, memory they share, recomputations that differ."""
