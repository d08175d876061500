"""Virtual devices on the CPU that detect unordered uses of memory."""
