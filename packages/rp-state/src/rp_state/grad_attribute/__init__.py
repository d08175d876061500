"""The ``.grad`` attributes of a model's parameters and masters, as users see them."""
