"""What a call of a model needs beside its layers: microbatches, a loss, a place for its outputs."""
