"""Threads, locks and the devices they serve."""
