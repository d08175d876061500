"""Documents to the batches of any step: packed into rows, collated with their images, made ahead."""
