"""The optimizers, one file each."""
