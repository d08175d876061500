"""What goes wrong with a server of text; each message names the server and says what to do.

::

    RoundPipeError (RuntimeError)
    └── ServerError                   base of these
        ├── ServerUnreachable         nobody answers at the address, or the connection broke
        ├── ServerTimeout             no answer, or no end of a transfer, within the time limit
        ├── ServerRefused             an answer with an error's status
        ├── BadAnswer                 an answer that is not what the server's interface says
        ├── UnfitServer               a server that cannot take these weights, or cannot take any
        └── TransferFailed            the connection for weights broke
"""

from __future__ import annotations

from rp_errors import RoundPipeError


class ServerError(RoundPipeError):
    """A server of text failed.

    The model, its optimizer and its checkpoints are as they were: a training goes on from its last checkpoint.
    """


class ServerUnreachable(ServerError):
    """Nobody answers at the address, or the connection broke."""


class ServerTimeout(ServerError):
    """There was no answer, or no end of a transfer, within the time limit."""


class ServerRefused(ServerError):
    """The server answered with an error's status. `status`: the number."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class BadAnswer(ServerError):
    """The answer is not what the server's interface says."""


class UnfitServer(ServerError):
    """The server cannot take these weights, or cannot take any."""


class TransferFailed(ServerError):
    """The connection for weights broke."""
