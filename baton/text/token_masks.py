"""Token masks for one choice (one output of a request) that must follow a grammar. A mask contains the tokens that are
allowed next. A separate thread computes masks before they are needed.

`baton.text.grammars` creates a ChoiceMasks object for each choice of a request. The engine's thread owns the object,
appends the tokens of the choice, and requests a mask when it samples the next token. Appending a token starts the
computation of the mask for the next token. The mask is computed during the step's forward pass, and the engine's thread
waits only if the mask is not ready afterwards.

Draft tokens are appended too. Dropping drafts only moves a pointer back. If the same drafts are appended again, their
masks are already computed.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError

Mask = NDArray[np.float32]
"""Upper bound of each token's logit, indexed by token id: infinity for allowed tokens, minus infinity for all others.
Tokens beyond the end of the array are not allowed. The mask is applied as a minimum, which takes a tenth of the time of
applying a bool mask."""
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_CEILINGS_OF_BYTE = _CEILINGS.astype(np.float32)
"""Table that converts one byte of a bitmask of allowed tokens (one bit for each token) to eight values of a Mask:
infinity for a bit that is set, minus infinity otherwise."""


class Matcher:
    """State of a grammar after the tokens of one output. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Take ownership of `matcher`, a matcher of the library that has not consumed any token. The caller must not
        use it any more."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_tokens = 0
        self._end: int | None = None
        """Number of tokens before the end-of-sequence token. None if the output has no end-of-sequence token.

        The library's matcher gets neither the end-of-sequence token nor later tokens. It sometimes does not count an
        end-of-sequence token, and a rollback would then remove the wrong number of tokens.
        """

    def go_to(self, num_tokens: int) -> None:
        """Remove all tokens after the first `num_tokens` tokens of the output."""
        num_consumed = self._num_tokens if self._end is None else self._end
        if num_tokens < num_consumed:
            self._matcher.rollback(num_consumed - num_tokens)
        if self._end is not None and num_tokens <= self._end:
            self._end = None
        self._num_tokens = num_tokens

    def consume(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens of the output. Raises InvalidArgumentError for a token that the grammar does not
        allow."""
        for token_id in token_ids:
            if self._end is None and not self._take(token_id):
                raise InvalidArgumentError(
                    f"output token {self._num_tokens} ({token_id}) is none that sampling.structured_output allows: "
                    "send the tokens of an output with that form"
                )
            self._num_tokens += 1

    def mask(self) -> Mask:
        """Compute the mask of the next token. Raises InvalidArgumentError if the grammar exceeds a limit after the
        tokens so far."""
        if self._end is not None:
            ended = np.full(self._vocab_size, -np.inf, dtype=np.float32)
            ended[list(self._eos_token_ids)] = np.inf
            return ended
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:200]
            raise InvalidArgumentError(
                f"sampling.structured_output cannot be followed behind {self._num_tokens} output tokens: {reason}; "
                "use a simpler form"
            )
        return _CEILINGS_OF_BYTE.take(bits, axis=0).reshape(-1)[: self._vocab_size]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens in `token_ids` that the grammar allows as the next tokens. The state is
        not changed."""
        if self._end is not None or not token_ids:
            return 0
        if token_ids[0] in self._eos_token_ids:  # the library does not validate it if it has foreseen the end
            return int(self._matcher.is_accepting())
        return self._matcher.validate_tokens(list(token_ids))

    def _take(self, token_id: int) -> bool:
        if token_id not in self._eos_token_ids:
            return self._matcher.consume_token(token_id)
        if self._matcher.is_accepting():
            self._end = self._num_tokens
        return self._end is not None


class ChoiceMasks:
    """Token masks of one choice (one output of a request). The first mask contains the tokens that are allowed next.
    Further masks belong to the positions after the draft tokens that were passed to `foresee`. Owned by the thread that
    appends tokens."""

    def __init__(self, matcher: Matcher, num_tokens: int, mask: Mask, thread: Executor) -> None:
        """Create the masks of a choice that has `num_tokens` tokens. `matcher` has already consumed these tokens, and
        `mask` is the mask of the token after them. `thread` is an executor with one thread. Only this thread uses the
        matcher from now on."""
        self._matcher = matcher
        self._thread = thread
        ready: Future[Mask] = Future()
        ready.set_result(mask)
        self._start = num_tokens
        """Number of the choice's tokens before those in `_token_ids`."""
        self._token_ids: list[int] = []
        """Tokens for which masks are stored. The first `_place` tokens are part of the choice's output. All further
        tokens were dropped, or are drafts that were passed to `foresee`."""
        self._masks = [ready]
        """Stored masks, as futures. Mask 0 is the mask of the position of the first token in `_token_ids`. Mask i + 1
        is the mask of the position after token i of `_token_ids`."""
        self._place = 0
        """Number of tokens in `_token_ids`, counted from the first, that are part of the choice's output."""

    def allowed(self) -> Mask:
        """Return the mask of the next token, and wait until it is computed. Raises InvalidArgumentError if the grammar
        does not allow one of the appended tokens, or exceeds a limit."""
        return self._masks[self._place].result()

    def append(self, token_id: int) -> None:
        """Append the next token, and start to compute the mask of the position after this token. If this mask was
        already started for the same token, that computation is reused."""
        if self._token_ids[self._place : self._place + 1] != [token_id]:
            del self._token_ids[self._place :], self._masks[self._place + 1 :]
            num_before = self._start + self._place
            self._token_ids.append(token_id)
            self._masks.append(self._thread.submit(self._advance, num_before, token_id))
        self._place += 1

    def drop(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens, which must have been appended after the last call of `settle`. Their
        masks are kept in case the same tokens are appended again."""
        assert num_tokens <= self._place, (num_tokens, self._place)
        self._place -= num_tokens

    def foresee(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading drafts in `token_ids` that the grammar allows as the next tokens. Blocks until
        the grammar has checked the drafts. Starts to compute, in the background, the mask of the position after each
        allowed draft."""
        num_known = 0
        for known, token_id in zip(self._token_ids[self._place :], token_ids, strict=False):
            if known != token_id:
                break
            num_known += 1
        num_new = 0
        if unknown := list(token_ids[num_known:]):
            end = self._place + num_known
            del self._token_ids[end:], self._masks[end + 1 :]
            num_new = self._thread.submit(self._num_allowed, self._start + end, unknown).result()
        for token_id in token_ids[: num_known + num_new]:
            self.append(token_id)
        self.drop(num_known + num_new)
        return num_known + num_new

    def settle(self, num_drafts: int) -> None:
        """Wait until `num_drafts` + 1 masks are computed: the mask of the next token, and one mask for the position
        after each of the next `num_drafts` draft tokens. Raises the errors of `allowed`.

        Before this call, the drafts must have been passed to `foresee`, or must have been appended and then dropped.
        After this call, `drop` can only remove tokens that are appended later.
        """
        del self._token_ids[: self._place], self._masks[: self._place]
        self._start += self._place
        self._place = 0
        for mask in self._masks[: num_drafts + 1]:
            mask.result()

    def _advance(self, num_before: int, token_id: int) -> Mask:
        self._matcher.go_to(num_before)
        self._matcher.consume((token_id,))
        return self._matcher.mask()

    def _num_allowed(self, num_before: int, token_ids: Sequence[int]) -> int:
        self._matcher.go_to(num_before)
        return self._matcher.num_allowed(token_ids)
