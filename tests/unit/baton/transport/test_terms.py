"""A worker refuses the calls of an orchestrator after it has seen a higher term."""

import pytest

from baton.errors import InvalidArgumentError, StaleTermError, UnauthenticatedError
from baton.transport.terms import NO_TERM, TERM_KEY, SeenTerms, term_metadata
from tests.support.wire.secret import SECRET

METHOD = "/baton.v1.KvReceiver/Reserve"


def call(seen: SeenTerms, term: int) -> None:
    seen.check(METHOD, (*SECRET.metadata, *term_metadata(term)))


def test_a_lower_term_is_refused_and_changes_nothing() -> None:
    seen = SeenTerms(SECRET)
    for term in (2, 2, 7, 7):
        call(seen, term)
    with pytest.raises(StaleTermError, match="term 2 has ended: an orchestrator of term 7 has replaced this one"):
        call(seen, 2)
    assert seen.highest == 7
    call(seen, 7)


def test_callers_without_a_term_are_always_accepted() -> None:
    seen = SeenTerms(SECRET)
    call(seen, 5)
    call(seen, NO_TERM)
    seen.require(NO_TERM)
    assert seen.highest == 5


def test_a_caller_without_the_secret_cannot_raise_the_term() -> None:
    seen = SeenTerms(SECRET)
    with pytest.raises(UnauthenticatedError):
        seen.check(METHOD, term_metadata(9))
    assert seen.highest == NO_TERM


@pytest.mark.parametrize("text", ["", "-1", "1.5", "one", b"1", "1" * 19])
def test_a_term_that_is_not_a_number_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{TERM_KEY} is not a number"):
        SeenTerms(SECRET).check(METHOD, (*SECRET.metadata, (TERM_KEY, text)))
