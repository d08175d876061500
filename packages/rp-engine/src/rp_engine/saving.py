"""What whoever saves and loads a model asks of the engine: its tensors between two steps, and their masters."""

from rp_state.master import is_split, published, reading

from rp_engine.engine.model_read import ModelBetweenSteps, ModelTensor

__all__ = ["ModelBetweenSteps", "ModelTensor", "is_split", "published", "reading"]
