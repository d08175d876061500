"""Which tensors a server takes of a model."""
