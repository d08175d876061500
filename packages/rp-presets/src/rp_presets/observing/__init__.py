"""Observation of a model's forward: where its layers are, and the proof that they form a row."""
