"""What layers change beside their outputs: containers that they are handed, and buffers."""
