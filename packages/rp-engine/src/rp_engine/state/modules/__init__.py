"""A model's modules as the engine found them: who owns their parameters, and whether they have changed."""
