"""What users hold: models over rows of layers, and modules taken apart."""
