"""FP8 codes of trained weights, which travel to devices in their place."""
