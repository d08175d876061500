"""The formats: how numbers become codes and scales, and back."""
