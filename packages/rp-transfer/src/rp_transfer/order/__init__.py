"""The order of access to memory, and copies in that order."""
