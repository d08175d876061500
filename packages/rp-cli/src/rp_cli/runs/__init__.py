"""The folders of a model, an adapter and a tokenizer that a run, a folder or a name on the hub leads to."""
