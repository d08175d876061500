"""Whether Python or graphs launch the calls of a model, chosen by what calls take."""
