"""Tokens and logits of the sample model as computed by transformers, stored in a file.

`python -m tests.support.models.smollm2_reference` writes the file.

Prompts are passages of a novel; half of them are formatted as a chat message. For each prompt, the file stores a greedy
continuation. For each of its tokens, the file stores the best logits and the log-sum-exp of all logits, which suffice
for the rule of equal tokens.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from baton.text.tokenizer import Tokenizer
from tests.support.folders import DATA
from tests.support.models.texts import passage_ids

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedModel

NUM_NEW = 64
NUM_BEST = 8
PLAIN_LENGTHS = (10, 90, 333, 700, 3000)
CHAT_LENGTHS = (15, 60, 250, 500, 1200)
PATH = DATA / "smollm2_reference.npz"


@dataclass(frozen=True)
class Reference:
    """A prompt, its greedy continuation, and the logits from which each token of the continuation was chosen."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    best_TK: Tensor
    """Ids of the NUM_BEST tokens with the largest logits, in descending order."""
    logits_TK: Tensor
    sums_T: Tensor
    """Log-sum-exp of all logits."""

    @property
    def gaps_T(self) -> Tensor:
        return self.logits_TK[:, 0] - self.logits_TK[:, 1]


def prompts(folder: Path) -> list[tuple[int, ...]]:
    """Return the prompts. The last prompt of each half is a long one."""
    tokenizer = Tokenizer.load(folder)
    plain = [passage_ids(folder, length, 700 * place) for place, length in enumerate(PLAIN_LENGTHS)]
    chats = []
    for place, length in enumerate(CHAT_LENGTHS):
        content = "What happens here? " + tokenizer.decode(passage_ids(folder, length, 5000 + 700 * place))
        chats.append(tuple(tokenizer.encode_chat([{"role": "user", "content": content}])))
    return plain + chats


def load(folder: Path) -> list[Reference]:
    """Return the contents of the file. Raises ValueError if the file was made from different prompts."""
    asked = prompts(folder)
    with np.load(PATH, allow_pickle=False) as file:
        if file["prompts"].tolist() != _sums(asked):
            raise ValueError(f"{PATH.name} was made of other prompts: make it anew (tests/support/models)")
        outputs, *others = (file[name] for name in ("outputs", "best", "logits", "sums"))
    return [
        Reference(prompt_ids, tuple(output.tolist()), *(torch.from_numpy(each[place]) for each in others))
        for place, (prompt_ids, output) in enumerate(zip(asked, outputs, strict=True))
    ]


def transformers_model(folder: Path) -> "PreTrainedModel":
    """Return the reference model of transformers in fp32."""
    from transformers import AutoModelForCausalLM

    from_pretrained: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    return from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def decisions(model: "PreTrainedModel", prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """Return the logits `[NUM_NEW, V]` after the prompt and after each output token except the last one, computed in
    one forward pass."""
    token_ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
    logits_TV: Tensor = model(token_ids, use_cache=False, logits_to_keep=NUM_NEW).logits[0]
    return logits_TV


@torch.inference_mode()
def make(model: "PreTrainedModel", prompt_ids: tuple[int, ...]) -> Reference:
    generate: Any = model.generate
    inputs = torch.tensor([prompt_ids])
    made = generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
    )
    output_ids = tuple(made[0, len(prompt_ids) :].tolist())
    logits_TV = decisions(model, prompt_ids, output_ids)
    best = logits_TV.topk(NUM_BEST)
    return Reference(prompt_ids, output_ids, best.indices.int(), best.values, logits_TV.logsumexp(1))


def _sums(asked: Sequence[Sequence[int]]) -> list[int]:
    return [zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes()) for prompt_ids in asked]


def main() -> None:
    from baton.modeling.checkpoints.catalog import resolve_model
    from baton.text.gguf_tokenizer import write_tokenizer
    from tests.conftest import MODEL_CACHE

    folder = resolve_model(
        "smollm2-135m",
        cache=MODEL_CACHE,
        progress=lambda done, total: None,
        finish=write_tokenizer,
        dequantised=True,
    )
    model = transformers_model(folder)
    made = [make(model, prompt_ids) for prompt_ids in prompts(folder)]
    np.savez_compressed(
        PATH,
        prompts=np.array(_sums([each.prompt_ids for each in made]), np.int64),
        outputs=np.array([each.output_ids for each in made], np.int32),
        best=torch.stack([each.best_TK for each in made]).numpy(),
        logits=torch.stack([each.logits_TK for each in made]).numpy(),
        sums=torch.stack([each.sums_T for each in made]).numpy(),
    )


if __name__ == "__main__":
    main()
