"""What the machines of one training do together, and one machine alone."""
