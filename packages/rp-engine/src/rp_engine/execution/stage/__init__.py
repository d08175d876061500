"""A stage: one task on its device."""
