"""Write a checkpoint while training goes on."""
