"""A model's weights, gradients, buffers and master weights in host memory."""
