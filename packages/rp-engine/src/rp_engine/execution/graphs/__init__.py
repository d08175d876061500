"""Graphs of a task's layers: which there are, where their memory lies, and their replays."""
