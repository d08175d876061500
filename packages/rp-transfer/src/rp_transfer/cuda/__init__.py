"""CUDA devices through CuPy, and their pinned host memory."""
