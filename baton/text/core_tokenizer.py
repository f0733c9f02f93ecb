"""Converts text to token ids and back, with the core of a model's tokenizer: the `tokenizers` library.

Chat templates are in `baton.text.tokenizer`, which needs transformers. Workers use this module alone, because they only
convert token ids to text (`CoreTokenizer.detokenizer`), and start faster without transformers.
"""

from collections.abc import Sequence
from functools import cached_property, partial

from tokenizers import Tokenizer as Core

from baton.errors import InvalidArgumentError
from baton.text.detokenizer import Detokenizer, text_after


class CoreTokenizer:
    """Tokenizer of one model, without chat templates. It is not changed after its creation, so any thread may use it.
    Encoding does not block other threads."""

    def __init__(self, core: Core) -> None:
        """Create a tokenizer. `core` belongs to it from now on."""
        self._core = core
        core.no_truncation()  # a tokenizer.json may carry the limits of its training, which would cut prompts
        core.no_padding()
        self._special_ids = frozenset(
            token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special
        )

    def silent_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the texts among `texts` that the tokenizer encodes as a single special token, by token id. `decode`
        skips these tokens by default."""
        ids = {self._core.token_to_id(text): text for text in texts}
        return {token_id: text for token_id, text in ids.items() if token_id in self._special_ids}

    def to_json(self) -> str:
        """Return the tokenizer, including added tokens, in the format of tokenizer.json."""
        text: str = self._core.to_str()
        return text

    def has_tokens_of(self, other: "CoreTokenizer") -> bool:
        """Return True if both tokenizers have the same tokens with the same ids. Added tokens are included."""
        mine, theirs = (each._core.get_vocab(with_added_tokens=True) for each in (self, other))
        return bool(mine == theirs)

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to token ids. A beginning-of-sequence token is added if the tokenizer's post-processor adds
        one. The characters of a special token in the text are encoded as the special token. Raises InvalidArgumentError
        for text that is not valid Unicode."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Convert token ids to text. Unknown ids are skipped. Special tokens are skipped unless `with_special` is True.
        Invalid UTF-8 becomes U+FFFD."""
        return self._core.decode(ids, skip_special_tokens=not with_special)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as if it were in the middle of a text. The text includes a leading space, which
        `decode` drops at the start of a text. Special tokens and unknown ids have empty text. An incomplete character
        becomes U+FFFD."""
        return text_after(self.decode, *self._within, [token_id])

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, with_special: bool = False) -> Detokenizer:
        """Return a new Detokenizer, which decodes the tokens of one stream incrementally. `prompt_ids` are the tokens
        before the stream's first token. Special tokens are skipped unless `with_special` is True."""
        if with_special:
            return Detokenizer(partial(self.decode, with_special=True), self._is_unknown, prompt_ids)
        return Detokenizer(self.decode, self._is_silent, prompt_ids)

    @cached_property
    def _within(self) -> tuple[list[int], str]:
        """Token ids of a letter, and their text. Tokens that follow them are decoded as in the middle of a text."""
        ids = self._encode("a", "text", add_special_tokens=False)
        return ids, self.decode(ids)

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special_ids or self._is_unknown(token_id)

    def _is_unknown(self, token_id: int) -> bool:
        return self._core.id_to_token(token_id) is None

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{field}: not Unicode text: lone surrogate at character {error.start}; send valid UTF-8"
            ) from error
        (ids,) = self._encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    def _encode_all(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # `encode` would hold the GIL, and so block the process's asyncio loop, until it returns.
        return [each.ids for each in self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
