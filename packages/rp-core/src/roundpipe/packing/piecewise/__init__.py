"""Packing and expanding large weights piece by piece, on all cores."""
