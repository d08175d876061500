"""A model's modules: who owns their parameters, whether they have changed, and what they were seen to do."""
