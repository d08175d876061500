"""What users may set for a model or a call."""
