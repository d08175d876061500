"""The data of a fine-tuning: files, samples, tokens, sequences, and the order in which they are trained on."""
