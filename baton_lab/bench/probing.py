"""Sends two requests before any load, to warm up the server and to measure its tokens per word. Runs on the event
loop."""

from collections.abc import Callable

from baton.errors import UnavailableError
from baton_lab.bench.passages import TOKENS_PER_WORD, Passages
from baton_lab.bench.records import MessageLog, RequestFailedError
from baton_lab.bench.server import Server

_MOST_WORDS = 400
_LEAST_WORDS = 8
_ANSWER_TOKENS = 2


async def probe(server: Server, passages: Passages, now_s: Callable[[], float]) -> None:
    """Send a short and a longer passage, and set `passages.tokens_per_word` from the prompt token counts that the
    server reports.

    The estimate uses the difference of the two counts, so the tokens of the chat template cancel out. Raises
    UnavailableError if one of the requests fails.
    """
    most = _MOST_WORDS if server.about.context_tokens is None else server.about.context_tokens // 8
    far = max(min(_MOST_WORDS, most), 2)
    near = max(far // _LEAST_WORDS, 1)
    counted = []
    for num_words in (near, far):
        text = passages.take(round(num_words * TOKENS_PER_WORD))
        log = MessageLog(now_s)
        try:
            counts = await server.ask([("user", text)], _ANSWER_TOKENS, log)
        except RequestFailedError as error:
            raise UnavailableError(
                f"{server.about.model} does not answer a prompt of {num_words} words ({error.kind}): {error}"
            ) from error
        if counts is not None:
            counted.append((len(text.split()), counts.num_prompt))
    if len(counted) == 2 and counted[1][1] > counted[0][1]:
        (words, tokens), (more_words, more_tokens) = counted
        passages.tokens_per_word = (more_tokens - tokens) / (more_words - words)
