"""What a wrapped model and the user's own model have in common."""
