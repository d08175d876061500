"""How weights go from the trainer to the processes of a server."""
