"""The compiled update kernels, how they are built, and their reference."""
