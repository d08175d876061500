"""The computations of `roundpipe plan`: a model from its config, a machine from its description, the answer."""
