"""A task's weights, activations, gradients and random state on its device."""
