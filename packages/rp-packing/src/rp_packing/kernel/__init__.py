"""Expand packed weights on CUDA devices in one pass, by a kernel."""
