"""What `roundpipe plan` computes: a model from its config, a machine from a few words, and the answer."""
