"""Plans from measurements: estimates of layer times, and the plan in use."""
