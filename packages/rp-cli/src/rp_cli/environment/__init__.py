"""The facts that `roundpipe env` prints: versions, memory, devices, rates, and what is missing."""
