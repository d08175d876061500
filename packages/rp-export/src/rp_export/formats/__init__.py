"""Formats of other programs, by their own converters, compared with what was converted."""
