"""The runtime: devices, their threads, and the order of calls."""
