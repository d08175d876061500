"""The errors raised for models and losses that cannot be used."""


class UnsupportedModel(NotImplementedError):
    """No preset can convert this model.

    The message names the model type, the class of the model, and the types and classes that are supported.

    >>> from torch import nn
    >>> from rp_presets import UnsupportedModel, to_sequential
    >>> try:
    ...     to_sequential(nn.Linear(2, 2))
    ... except UnsupportedModel as error:
    ...     print("Linear" in str(error))
    True
    """


class UnknownLoss(NotImplementedError):
    """How a model's own loss divides could not be found, so its loss over a split batch is unknown.

    The message says what was tried.

    >>> from rp_presets import UnknownLoss
    >>> issubclass(UnknownLoss, NotImplementedError)
    True
    """
