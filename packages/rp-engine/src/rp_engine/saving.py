"""What whoever saves and loads a model asks of the engine: its tensors between two steps, and their masters."""

from rp_state.master import is_split, published, reading

from rp_engine.engine.capture import Captured, Held

__all__ = ["Captured", "Held", "is_split", "published", "reading"]
