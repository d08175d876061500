"""What `roundpipe env` tells: versions, memory, devices, rates, and what is missing."""
