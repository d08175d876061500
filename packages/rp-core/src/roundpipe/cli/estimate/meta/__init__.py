"""A language model on the meta device: made, run and metered without memory."""
