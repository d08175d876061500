"""What users are told of a model on the host."""
