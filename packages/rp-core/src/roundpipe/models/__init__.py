"""The wrappers that users call: `RoundPipe` and `AutoRoundPipe`, and the functions that make them."""
