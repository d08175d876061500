"""The optimizers, one file each, and the update rules they share."""
