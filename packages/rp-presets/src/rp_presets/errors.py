"""The errors raised for models and losses that cannot be used."""


class UnsupportedModel(NotImplementedError):
    """The model cannot be shown to be a row of layers; the message names what it does.

    >>> from torch import nn
    >>> from rp_presets import UnsupportedModel, to_sequential
    >>> try:
    ...     to_sequential(nn.Linear(2, 2))
    ... except UnsupportedModel as error:
    ...     print("Linear" in str(error))
    True
    """


class NotARow(UnsupportedModel):
    """A list of layers is no row. `path`: the name of the list in the model."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r} is no row of layers: {reason}")
        self.path = path
        self.reason = reason


class UnknownLoss(NotImplementedError):
    """How a model's own loss divides could not be found, so its loss over a split batch is unknown.

    The message says what was tried.

    >>> from rp_presets import UnknownLoss
    >>> issubclass(UnknownLoss, NotImplementedError)
    True
    """
