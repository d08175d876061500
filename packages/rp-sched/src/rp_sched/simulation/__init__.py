"""How long a plan takes and how much memory it needs."""
