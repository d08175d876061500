"""A checkpoint's files before they are read: safe, whole, and of their kind."""
