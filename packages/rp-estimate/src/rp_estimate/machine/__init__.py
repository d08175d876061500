"""The machine to plan for: cards by name, a measured one, its disk, and the network to others."""
