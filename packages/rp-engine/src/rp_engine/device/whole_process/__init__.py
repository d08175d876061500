"""What torch keeps once for a whole process, and threads of several devices must not share."""
