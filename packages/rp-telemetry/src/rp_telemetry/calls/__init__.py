"""Calls that are over or under way: their times, and what plans promised of these."""
