"""`WeightSender`: keeps the weights of a server those of a model, by numbered versions."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from rp_errors import add_note

from rp_serving.errors import ServerError, ServerRefused, ServerTimeout, TransferFailed, UnfitServer
from rp_serving.jobs import begin
from rp_serving.server import GenerationServer, ServerFacts
from rp_serving.transports.transport import WeightTransport
from rp_serving.weights.model import ModelWeights, SentTensors

_LOG = logging.getLogger(__name__)
# How long the server's own words are waited for when the connection for weights breaks.
_WORDS_S = 2.0
_NCCL = '\'{"backend": "nccl"}\''


class WeightSender:
    """Sends all weights of a model, layer by layer, whenever the server has not got this version.

    One layer is read (and merged) while the one before is on its way: host memory of two layers at most.

    `sent_bytes`: of the last version that was sent; `sent_s`: the seconds that took.
    """

    def __init__(self, server: GenerationServer, transport: WeightTransport, weights: ModelWeights) -> None:
        self._server, self._transport, self._weights = server, transport, weights
        self._instance: str | None = None
        self._is_joined = False
        self._version: object = None
        self.sent_bytes, self.sent_s = 0, 0.0

    def forget(self) -> None:
        """Send again before the next generation, whatever the version."""
        self._version = None

    def checked(self) -> ServerFacts:
        """Ask who the server is. Raises `UnfitServer`, if it cannot take the weights, and as the server does."""
        facts = self._server.facts()
        if not facts.takes_weights:
            raise UnfitServer(f"{self._server} takes no weights; start it with --weight-transfer-config {_NCCL}")
        own = self._weights.vocabulary
        if None not in (own, facts.vocabulary) and own != facts.vocabulary:
            raise UnfitServer(
                f"{self._server} has a model of {facts.vocabulary} tokens, but the policy has {own}; start the "
                "server with the checkpoint that the training began with"
            )
        return facts

    def has(self, facts: ServerFacts) -> bool:
        """Return whether this is still the server that has got the weights, as far as it says who it is."""
        return self._version is not None and facts.instance is not None and facts.instance == self._instance

    def bring(self, version: object) -> bool:
        """See to it that the server has these weights; return whether they were sent.

        `version`: equal for equal weights; None: send in any case. A server that was started again, or does not
        say whether it was, gets all weights again.

        Raises errors of `rp_serving.errors`.
        """
        facts = self.checked()
        if version is not None and version == self._version and self.has(facts):
            return False
        if facts.instance != self._instance:
            self._leave()
        self._version, self._instance = None, facts.instance
        self._send(facts)
        self._version = version
        return True

    def _send(self, facts: ServerFacts) -> None:
        begun = time.perf_counter()
        was_joined = self._is_joined
        try:
            self._update(facts)
        except (TransferFailed, ServerRefused) as error:
            self._give_up()
            if not was_joined:
                raise
            # A server that was started again knows nothing of the connection.
            _LOG.warning("%s has lost the connection for weights (%s); all are sent again", self._server, error)
            self._update(facts)
        except BaseException:
            self._give_up()
            raise
        self.sent_bytes, self.sent_s = self._weights.nbytes, time.perf_counter() - begun
        _LOG.debug("sent %d bytes of weights to %s in %.3f s", self.sent_bytes, self._server, self.sent_s)

    def _update(self, facts: ServerFacts) -> None:
        if not self._is_joined:
            self._join(facts)
        self._server.begin_update()
        under_way: Callable[[], None] | None = None
        for piece in self._weights.pieces:
            tensors = piece.read()
            if under_way is not None:
                under_way()
            announced = self._transport.announce(tensors)
            under_way = self._both(
                lambda piece=piece, announced=announced: self._server.receive(piece.outlines, announced),
                lambda tensors=tensors: self._transport.send(tensors),
                _words_of(piece),
            )
        if under_way is not None:
            under_way()
        self._server.finish_update()
        self._server.forget_prefixes()

    def _join(self, facts: ServerFacts) -> None:
        where = self._transport.prepare(self._server.host, facts.receivers, self._server.limit_s)
        words = f"a connection for weights with {facts.receivers} processes"
        self._both(lambda: self._server.join(where), self._transport.open, words)()
        self._is_joined = True

    def _both(self, answer: Callable[[], None], move: Callable[[], None], words: str) -> Callable[[], None]:
        """Begin a request and what the server does meanwhile; return what waits for both, for a limited time."""
        answered, moved = begin(answer), begin(move)
        deadline = time.monotonic() + self._server.limit_s
        return lambda: self._end(answered, moved, deadline, words)

    def _end(self, answer: Future[None], moved: Future[None], deadline: float, words: str) -> None:
        both = [answer, moved]
        done, late = wait(both, max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        if moved in done and moved.exception() is not None:
            # The server may say why.
            wait([answer], _WORDS_S)
        for one in both:
            if one.done() and (error := one.exception()) is not None:
                raise _as_server_error(error, f"{self._server}: {words} failed")
        if late:
            raise ServerTimeout(
                f"{self._server}: {words} did not end within {self._server.limit_s:.3g} s, though the server "
                "still answers; see its log, whether it reaches this machine, and whether limit_s is enough"
            )

    def _give_up(self) -> None:
        self._leave()
        # So that the server is ready for another update; it may be gone.
        with contextlib.suppress(ServerError):
            self._server.finish_update()

    def _leave(self) -> None:
        self._is_joined = False
        self._transport.abort()


def _words_of(piece: SentTensors) -> str:
    return f"sending {piece.outlines[0].name} and {len(piece.outlines) - 1} others"


def _as_server_error(error: BaseException, words: str) -> BaseException:
    if isinstance(error, ServerError):
        add_note(error, words)
    if isinstance(error, ServerError) or not isinstance(error, Exception):
        return error
    made = TransferFailed(f"{words}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    made.__cause__ = error
    return made
