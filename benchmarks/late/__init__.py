"""What `staleness.py` consists of: workloads, variants of late steps, training loops, and a report."""
