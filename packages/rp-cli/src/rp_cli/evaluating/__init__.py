"""How good a model is: its loss on data that it was not trained on, and its scores in lm-eval's tasks."""
