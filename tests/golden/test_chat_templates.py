"""Chats become the text and the tokens that transformers makes of them, in every family's format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.errors import InvalidArgumentError
from baton.text.tokenizer import Tokenizer
from tests.support.models.chats import CHATS, CONVERSATIONS, QUESTION, TURNS, ChatFamily, Messages


@dataclass(frozen=True)
class Chat:
    """A family's tokenizer, ours and the one that transformers chooses."""

    name: str
    family: ChatFamily
    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module", params=sorted(CHATS))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    family = CHATS[request.param]
    folder = family.write(tmp_path_factory.mktemp(request.param))
    return Chat(request.param, family, Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_a_chat_is_written_as_the_family_writes_it(chat: Chat, number: int) -> None:
    messages = CONVERSATIONS[number]
    text = chat.ours.render_chat(messages)
    assert text == chat.family.written[number]
    assert text == chat.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_chat_has_the_tokens_that_transformers_gives_it(chat: Chat, messages: Messages) -> None:
    ids = chat.ours.encode_chat(messages)
    made = chat.theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids == made


def test_special_tokens_of_the_template_are_one_token_each(chat: Chat) -> None:
    written, ids = chat.family.written[2], chat.ours.encode_chat(CONVERSATIONS[2])
    spelled = [chat.theirs.convert_ids_to_tokens(token_id) for token_id in ids]
    for token in chat.family.special:
        assert spelled.count(token) == written.count(token)


def test_a_beginning_of_sequence_is_written_once_at_most(chat: Chat) -> None:
    ids = chat.ours.encode_chat(QUESTION)
    assert ids.count(chat.theirs.bos_token_id) == chat.family.written[0].count(chat.family.special[0]) <= 1


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_roles_that_a_template_refuses_are_the_clients_fault(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(CHATS[name].write(tmp_path))
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        tokenizer.render_chat([*TURNS, {"role": "user", "content": "again"}])


@pytest.mark.parametrize("name", sorted(CHATS))
def test_a_template_in_the_configuration_is_the_same(name: str, tmp_path: Path) -> None:
    beside, within = tmp_path / "beside", tmp_path / "within"
    beside.mkdir()
    within.mkdir()
    first, second = Tokenizer.load(CHATS[name].write(beside)), Tokenizer.load(CHATS[name].write(within, in_config=True))
    assert [second.encode_chat(each) for each in CONVERSATIONS] == [first.encode_chat(each) for each in CONVERSATIONS]
    assert second.fingerprint == first.fingerprint
