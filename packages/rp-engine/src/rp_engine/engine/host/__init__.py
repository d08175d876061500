"""One model's weights, gradients and masters on the host, between calls and steps."""
