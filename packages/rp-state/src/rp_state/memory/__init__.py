"""Where a block's tensors are on the host, and in which form they are on a device."""
