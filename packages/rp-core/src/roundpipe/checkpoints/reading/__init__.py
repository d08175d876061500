"""A checkpoint that is read: its files, what differs from what loads it, and states of optimizers."""
