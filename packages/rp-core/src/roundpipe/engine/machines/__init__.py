"""What several machines do together in the calls of a model."""
