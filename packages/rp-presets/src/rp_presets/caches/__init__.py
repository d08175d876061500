"""Caches of keys and values in calls of a row: handed to layers by reference, and held in microbatches."""
