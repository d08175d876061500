"""The error of a model that no preset can convert."""


class UnsupportedModel(NotImplementedError):
    """No preset makes a row of layers from this model.

    The message names the model type, the class of the model, and the types and classes that are supported.

    >>> from torch import nn
    >>> from rp_presets import UnsupportedModel, to_sequential
    >>> try:
    ...     to_sequential(nn.Linear(2, 2))
    ... except UnsupportedModel as error:
    ...     print("Linear" in str(error))
    True
    """
