"""The data of a fine-tuning: files, samples, tokens, sequences, and their order in training."""
