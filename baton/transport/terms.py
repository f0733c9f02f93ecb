"""Terms of orchestrators. Each process of an orchestrator has a term: a number that is higher than those of all earlier
processes. It sends its term with each call to a worker. A worker that has seen a higher term refuses the call. An
orchestrator that was cut off, and was replaced meanwhile, therefore changes nothing any more.

Servers of workers check terms (`baton.transport.channel.make_server`). `deploy.groups.terms` claims them. Calls of
other processes, such as those of ranks and supervisors, carry no term. Does no I/O. Owned by a worker's event loop.
"""

from collections.abc import Callable, Iterable

from baton.errors import InvalidArgumentError, StaleTermError
from baton.transport.identity import ClusterSecret

TERM_KEY = "baton-term"
"""Metadata key of the caller's term."""
NO_TERM = 0
"""Term of callers that have none. Their calls are always accepted."""

_MOST_DIGITS = 18
"""Maximum number of digits of a term, so that it fits into 64 bits."""

Metadata = Iterable[tuple[str, str | bytes]]


class SeenTerms:
    """Highest term that a worker has seen. Checks the secret and the term of each call."""

    def __init__(self, secret: ClusterSecret) -> None:
        self.highest = NO_TERM
        self.on_rise: Callable[[], None] = lambda: None
        """Function that is called when a higher term has been seen."""
        self._secret = secret

    def check(self, method: str, metadata: Metadata) -> None:
        """Raise UnauthenticatedError unless the metadata of a call contains the cluster's secret, and StaleTermError if
        the caller's term is lower than one that was seen before. Implements `status_interceptor.Check`."""
        self._secret.check(method, metadata)
        term = term_of(metadata)
        self.require(term)
        if term > self.highest:
            self.highest = term
            self.on_rise()

    def require(self, term: int) -> None:
        """Raise StaleTermError if a higher term than `term` was seen."""
        if NO_TERM != term < self.highest:
            raise StaleTermError(f"term {term} has ended: an orchestrator of term {self.highest} has replaced this one")


def term_of(metadata: Metadata) -> int:
    """Return the term in the metadata of a call; NO_TERM if there is none. Raises InvalidArgumentError if it is not a
    number."""
    text = dict(metadata).get(TERM_KEY, "0")
    if not (isinstance(text, str) and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise InvalidArgumentError(f"{TERM_KEY} is not a number: send the orchestrator's term, or leave it out")
    return int(text)


def term_metadata(term: int) -> tuple[tuple[str, str], ...]:
    """Return the metadata that an orchestrator of this term sends with each call to a worker."""
    return ((TERM_KEY, str(term)),) if term != NO_TERM else ()
