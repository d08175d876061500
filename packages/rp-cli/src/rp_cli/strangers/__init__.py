"""What may come from strangers: files that are bounded before they are read, programs, and what is printed."""
