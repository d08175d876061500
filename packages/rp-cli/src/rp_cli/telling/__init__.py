"""What only tells, and never ends a run."""
