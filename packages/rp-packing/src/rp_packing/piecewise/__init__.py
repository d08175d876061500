"""Pack and expand large weights piece by piece, on all cores."""
