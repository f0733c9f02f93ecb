"""baton.text.tokenizer: loading, encoding, the chat template, and what a user is told when something is wrong."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError, ModelError
from baton.text.tokenizer import Tokenizer
from tests.support.folders import DATA
from tests.support.models.tokenizers import CHAT_TEMPLATE, sentencepiece_core, sentencepiece_tokens, write_folder
from tests.unit.baton.text.test_gguf_tokenizer import sentencepiece_gguf

pytestmark = pytest.mark.integration

HELLO = [{"role": "user", "content": "hello"}]
WITHOUT_TORCH = """
import sys
from pathlib import Path
from baton.text.gguf_tokenizer import write_tokenizer
from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.tokenizer import Tokenizer
gguf = Path(sys.argv[1])
write_tokenizer(gguf, gguf.parent)
tokenizer = Tokenizer.load(gguf.parent)
ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
stream = TextStream.rebuild(tokenizer, StopStrings(["x"]), ids, ids)
stream.flush()
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_nothing_in_text_imports_torch(tmp_path: Path) -> None:
    gguf = sentencepiece_gguf(tmp_path / "model.gguf", chat_template=CHAT_TEMPLATE)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(gguf)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@given(text=st.text(st.characters(max_codepoint=0xFFFF, categories=["L", "N", "P", "Zs"], include_characters="\n\t")))
def test_decode_undoes_encode(smollm: Tokenizer, text: str) -> None:
    """Control characters and rare planes aside: the sample vocabulary lacks some bytes."""
    assert smollm.decode(smollm.encode(text)) == text


def test_encode_adds_bos_when_the_post_processor_does(sentencepiece: Tokenizer) -> None:
    hello = sentencepiece_tokens().index("\u2581hello")
    assert sentencepiece.encode("hello") == [1, hello]


def test_encode_adds_no_bos_when_the_post_processor_does_not(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("hello")[:1]) == "hello"


def test_special_tokens_in_text_become_their_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("<|im_start|>")[0] == 1


def test_decode_skips_special_tokens(smollm: Tokenizer) -> None:
    assert smollm.decode([1, *smollm.encode("hi"), 2]) == "hi"


def test_decode_skips_ids_beyond_the_vocabulary(smollm: Tokenizer) -> None:
    assert smollm.decode([*smollm.encode("hi"), smollm.vocab_size + 7]) == "hi"


def test_vocab_size_counts_to_the_largest_id(smollm: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert sentencepiece.vocab_size == len(sentencepiece_tokens())


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    core = sentencepiece_core()
    core.enable_truncation(max_length=3)
    core.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_folder(tmp_path, core))
    assert len(tokenizer.encode("a" * 50)) > 40
    assert len(tokenizer.encode("hello")) == 2


def test_lone_surrogate_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt: not Unicode text: lone surrogate at character 2"):
        smollm.encode("ab\ud800")


def test_chat_is_rendered_by_the_models_template(smollm: Tokenizer) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert smollm.encode_chat(HELLO) == smollm.encode(text)


def test_chat_template_may_be_in_the_config_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core(), chat_template=CHAT_TEMPLATE))
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode("<s>user: hello</s><s>assistant: ")[1:]


def test_chat_gets_no_second_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core(), chat_template=CHAT_TEMPLATE))
    assert tokenizer.encode_chat(HELLO)[:2].count(1) == 1


def test_model_without_chat_template_says_so(sentencepiece: Tokenizer) -> None:
    assert not sentencepiece.has_chat_template
    with pytest.raises(InvalidArgumentError, match="no chat template: send a text prompt or token ids"):
        sentencepiece.encode_chat(HELLO)


def test_what_the_template_refuses_is_the_users_error(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core(), chat_template=template))
    with pytest.raises(InvalidArgumentError, match="refuses them: roles must alternate"):
        tokenizer.encode_chat(HELLO)


def test_a_broken_template_is_the_models_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core(), chat_template="{% for x in %}"))
    with pytest.raises(ModelError, match=r"chat template in .* is broken"):
        tokenizer.encode_chat(HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], r"messages\[0\].content is None: use a string"),
        ([{"role": "user", "content": "a"}, {"role": 7, "content": "b"}], r"messages\[1\].role is 7: use a string"),
        ([{"role": "", "content": "a"}], r"messages\[0\].role is empty"),
        ([{"role": "user", "content": "a", "names": "b"}], r"messages\[0\].names is unknown"),
        ([{"role": "user", "content": "\udc00"}], "messages: not Unicode text"),
    ],
)
def test_bad_messages_are_refused(smollm: Tokenizer, messages: Sequence[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        smollm.encode_chat(messages)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in .*nowhere: there is no such folder"):
        Tokenizer.load(tmp_path / "nowhere")


def test_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="fetch the model's tokenizer files"):
        Tokenizer.load(tmp_path)


def test_folder_with_only_a_sentencepiece_file_is_told_to_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ModelError, match=r"convert tokenizer\.model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_file_is_one_line(tmp_path: Path, smollm_folder: Path, name: str) -> None:
    shutil.copytree(smollm_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(ModelError, match="cannot read the tokenizer in ") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sentencepiece_core(), auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    (folder / "evil.py").write_text(f"open({json.dumps(str(tmp_path / 'ran'))}, 'w')\nclass Evil: pass\n")
    Tokenizer.load(folder)
    assert not (tmp_path / "ran").exists()


CORPORA = (
    *(pytest.param(f"{name}.txt.gz", marks=pytest.mark.nightly) for name in ("emma", "persuasion", "prideprejudice")),
    "persuasion_2000.txt",
)


@pytest.mark.parametrize("name", CORPORA)
def test_a_text_has_the_ids_of_encode(smollm: Tokenizer, sentencepiece: Tokenizer, name: str) -> None:
    """`encode` of the tokenizers library, which keeps the GIL, says what is right."""
    data = (DATA / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith("gz") else data).decode()
    parts = [text, *(text[start : start + 1000] for start in range(0, len(text), 20_011))]
    parts.append("<|im_start|>user\n" + parts[1] + "<|im_end|><s> </s>")
    for tokenizer in (smollm, sentencepiece):
        for part in parts:
            assert tokenizer.encode(part) == tokenizer._core.encode(part).ids
            bare = tokenizer._core.encode(part, add_special_tokens=False).ids
            assert tokenizer.encode_rendered(part) == bare


@given(text=st.text())
def test_any_text_has_the_ids_that_it_has_without_threads(
    smollm: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for tokenizer in (smollm, sentencepiece):
        assert tokenizer.encode(text) == tokenizer._core.encode(text).ids


def test_many_threads_encode_and_decode_at_once(smollm: Tokenizer) -> None:
    text = gzip.decompress((DATA / "emma.txt.gz").read_bytes()).decode()[:200_000]
    parts = [text[start:] for start in range(8)]
    expected = [smollm.encode(part) for part in parts]
    with ThreadPoolExecutor(8) as pool:
        decoding = [pool.submit(smollm.decode, ids) for ids in expected]
        assert list(pool.map(smollm.encode, parts)) == expected
        assert [each.result() for each in decoding] == parts


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the GIL until it gives it up itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


def test_other_threads_run_while_a_long_text_is_encoded(smollm: Tokenizer, no_forced_switches: None) -> None:
    """Another thread comes to its turn within a call. It is encoded again while the machine has no time for both."""
    num_turns, done = 0, threading.Event()

    def take_turns() -> None:
        nonlocal num_turns
        while not done.is_set():
            num_turns += 1
            os.sched_yield()  # gives up the GIL

    def has_run_within_a_call() -> bool:
        before = num_turns
        smollm.encode("hello world " * 20_000)
        return num_turns > before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(take_turns)
        try:
            assert any(has_run_within_a_call() for _ in range(100))
        finally:
            done.set()
