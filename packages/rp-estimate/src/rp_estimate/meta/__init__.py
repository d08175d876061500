"""A language model on the meta device: created, run and measured without memory."""
