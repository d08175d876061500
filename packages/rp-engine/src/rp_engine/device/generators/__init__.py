"""The process's random generators beside torch's."""
