"""How tensors lie in host memory."""
