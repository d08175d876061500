"""The memory of activations on devices and on the host."""
