"""Images beside text: where they are, how they are decoded, and what a model's processor makes of them."""
