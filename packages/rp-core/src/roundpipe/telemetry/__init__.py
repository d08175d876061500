"""What is recorded while somebody looks: spans, layer times, profiles."""
