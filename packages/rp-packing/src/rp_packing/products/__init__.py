"""Products of linear layers in FP8: codes with a scale a row, scaled products, and linear layers that use them."""
