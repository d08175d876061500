"""What a step does to one tensor: as data, as compiled kernels, and as torch operations."""
