"""CUDA devices through CuPy, and memory pinned to the byte."""
