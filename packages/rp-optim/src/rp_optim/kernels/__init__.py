"""The optimizers' updates of tensors: as data, as compiled kernels, and as torch operations."""
