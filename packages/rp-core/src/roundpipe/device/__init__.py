"""One task's tensors on its device."""
