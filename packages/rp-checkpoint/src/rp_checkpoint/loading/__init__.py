"""Read a checkpoint: its files, its differences from the objects that it is loaded into, optimizer states."""
