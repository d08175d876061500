"""Models and data sets by their names on the Hugging Face hub."""
