"""Schedules as text, tables and traces."""
