"""The error raised for a model without a preset."""


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
