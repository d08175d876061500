"""Calls beside training: trials that leave no trace, and those whose layers write state."""
