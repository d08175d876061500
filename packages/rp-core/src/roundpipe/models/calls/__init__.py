"""What a call of a wrapped model may be made inside of: transforms, tracing and torch's compiler."""
