"""A model's weights, gradients and masters on the host."""
