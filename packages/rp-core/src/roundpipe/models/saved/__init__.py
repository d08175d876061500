"""What a wrapped model tells rp-checkpoint of itself."""
