"""What models take of host memory, before and after it is allocated."""
