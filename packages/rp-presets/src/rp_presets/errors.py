"""The errors for models, files and losses that cannot be used."""


class UnsupportedModel(NotImplementedError):
    """The model is not a row of layers, as far as can be shown; the message says what prevents it.

    >>> from torch import nn
    >>> from rp_presets import UnsupportedModel, to_sequential
    >>> try:
    ...     to_sequential(nn.Linear(2, 2))
    ... except UnsupportedModel as error:
    ...     print("Linear" in str(error))
    True
    """


class NotARow(UnsupportedModel):
    """A list of layers is not a row. `path`: the name of the list in the model."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r} is no row of layers: {reason}")
        self.path = path
        self.reason = reason


class ComputesBetween(NotARow):
    """The model computes from what a layer returned before layer `index` of the list is called."""

    def __init__(self, path: str, reason: str, index: int) -> None:
        super().__init__(path, reason)
        self.index = index


class UnknownLoss(NotImplementedError):
    """It is unknown how a model's own loss over a batch follows from the losses of its parts.

    The message says what the experiments showed.

    >>> from rp_presets import UnknownLoss
    >>> issubclass(UnknownLoss, NotImplementedError)
    True
    """


class DamagedFile(ValueError):
    """A file of a checkpoint or tokenizer is not what it should be; the message names it, and says what to do.

    >>> from rp_presets import DamagedFile
    >>> issubclass(DamagedFile, ValueError)
    True
    """
