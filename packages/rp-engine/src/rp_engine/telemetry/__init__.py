"""Measurements of the engine's work: trace spans, profiles and layer times."""
