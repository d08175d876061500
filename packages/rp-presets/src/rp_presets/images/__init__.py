"""Images in a row's batch: made to observe a model with, and divided among microbatches with their samples."""
