"""Virtual devices on the CPU that catch unordered memory accesses."""
