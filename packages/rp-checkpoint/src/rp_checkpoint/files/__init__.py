"""The files of a checkpoint: values, tensors, checksums, and folders that are in place at once."""
