"""Drafts made by the model itself, which attends to a subset of each sequence's KV (MagicDec; Sadhukhan et al., 2024).

At long contexts, most of a step's time is spent on reading KV. A step that reads few keys needs a small fraction of
this time, and mostly gives the same tokens. A draft view selects the keys. A draft step writes its KV to the memory of
the sequence's next tokens. The step that verifies the drafts overwrites this KV, so no KV of draft steps is used in the
next round.

`speculator` calls this module on the engine's thread.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, LayerTurns, SequenceSpan
from baton.modeling.forward.drawing import NO_LOGPROBS, RowDraw
from baton.modeling.forward.selection import StepPicks
from baton.modeling.forward.step_graphs import StepGraphs
from baton.modeling.forward.triton.step_inputs import StepTokens
from baton.planning.speculation import Ints
from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.residency.port import StepRows
from generate_workers.speculation.port import DraftOffers, DraftRequest
from generate_workers.speculation.stepwise import Going, draft_by_steps


@dataclass(frozen=True)
class DraftStep:
    """Input of one draft step: the new token and the KV of each sequence (a span), and the keys that each sequence
    attends to."""

    spans: Sequence[SequenceSpan]
    """One span per sequence of the draft step: its new token, and the KV of the keys that the draft view may attend
    to."""
    turns: LayerTurns | None = None
    """Methods that run between the layers of the draft step; None: nothing has to be done between layers."""
    picks: StepPicks | None = None
    """Keys that the sequences attend to, if they are selected before the draft step. None: sequences attend to all keys
    of the spans, or to the keys that `turns` selects."""


class DraftView(Protocol):
    """Draft view: determines the subset of each sequence's KV that draft steps attend to."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Prepare the draft steps that precede the next verifying step. The KV of the first `Row.num_cached` tokens of
        each sequence must be final. `num_keys`: for each sequence, the number of keys that its draft steps attend to. A
        number of 0 selects the view's default, and so does an empty list for all sequences. Views with a fixed number
        of keys ignore this argument."""
        ...

    def step(self, rows: StepRows) -> AbstractContextManager[DraftStep]:
        """Return the context of a draft step, which is a forward pass of one new token per sequence over the keys of
        the view. `rows`: some of the sequences that were passed to `begin`, in the same order."""
        ...

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence. Called when the sequence releases its slot."""
        ...


class SelfProposer:
    """Proposer (source of drafts) that runs the model itself over a subset of each sequence's KV. A draft step drafts
    one token for each sequence."""

    def __init__(
        self,
        decoder: Decoder,
        view: DraftView,
        num_keys: Sequence[int],
        *,
        keeps: bool = False,
        device_steps: StepGraphs | None = None,
    ) -> None:
        """`num_keys`: numbers of keys that draft steps may attend to. The first number is the configured one, which is
        also the view's default. More than one number is allowed only for a view whose `begin` uses the argument
        `num_keys`. `keeps`: True if the distributions from which drafts were sampled must be kept. `device_steps` runs
        draft steps entirely on the device; None: the decoder runs them."""
        self._decoder = decoder
        self._view = view
        self._num_keys_K = np.array(num_keys, np.int64)
        self._keeps = keeps
        self._device_steps = device_steps

    def offers(self, rows: Sequence[Row], num_known_B: Ints, most_drafts_B: Ints) -> DraftOffers:
        """Return one option for each number of keys that draft steps may attend to. A sequence does not have an option
        if it leads to as many of its keys as the configured number does, for example because both exceed the sequence's
        length. The kind of an option is its index."""
        used_BK = np.minimum(self._num_keys_K, num_known_B[:, None])
        differs_BK = used_BK != used_BK[:, :1]
        differs_BK[:, 0] = True
        shape = differs_BK.shape
        kinds_BK = np.broadcast_to(np.arange(shape[1]), shape)
        return DraftOffers(differs_BK * most_drafts_B[:, None], kinds_BK, np.broadcast_to(self._num_keys_K, shape))

    def prepare(self, rows: Sequence[Row]) -> None:
        """Do nothing: `draft` prepares the draft view."""

    @torch.inference_mode()
    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, with the requested number of tokens, or fewer if drafting stops early. Each
        draft token is the token that the sequence's sampler selects from the logits of the draft step."""
        rows = [request.row for request in draft_requests]
        self._view.begin(rows, [request.num_keys for request in draft_requests])
        draws = None if self._device_steps is None or self._keeps else _draws(draft_requests)
        if self._device_steps is not None and draws is not None:
            return self._launch(self._device_steps, draft_requests, draws)
        return draft_by_steps(draft_requests, self._run, keeps=self._keeps)

    def forget(self, row: Row) -> None:
        """Drop the draft view's state of the sequence."""
        self._view.forget(row)

    def _launch(
        self, steps: StepGraphs, requests: Sequence[DraftRequest], draws: Sequence[Sequence[RowDraw]]
    ) -> list[Draft]:
        """Launch all draft steps on the device, each with the tokens that the step before draws, and do not wait for
        them. `draws`: parameters for drawing the tokens of each draft."""
        drafts, sources = [Draft([]) for _ in requests], [-1] * len(requests)
        for index in range(max(request.num_drafts for request in requests)):
            going = [number for number, request in enumerate(requests) if request.num_drafts > index]
            rows = [requests[number].row for number in going]
            ends = [row.num_known + index for row in rows]
            tokens = StepTokens(
                token_ids=[row.token_ids[-1] for row in rows],
                sources=[sources[number] for number in going],
                positions=[end - 1 for end in ends],
                results=range(len(rows)),
                draws=[draws[number][index] for number in going],
            )
            spans = [(row.slot, TokenRange(end - 1, end)) for row, end in zip(rows, ends, strict=True)]
            with self._view.step(spans) as step:
                launched = steps.launch(tokens, step.spans)
            for place, number in enumerate(going):
                sources[number] = launched.first + place
                drafts[number].token_ids.append(0)
                drafts[number].unread.append((launched, place))
        return drafts

    def _run(self, going: Going, index: int) -> Tensor:
        """Run each sequence's last token over the keys of the view. Return the logits, `[R, V]`."""
        last_ids = [draft.token_ids[-1] if draft else row.token_ids[-1] for row, draft in going]
        ends = [row.num_known + index for row, _ in going]
        spans = [(row.slot, TokenRange(end - 1, end)) for (row, _), end in zip(going, ends, strict=True)]
        with self._view.step(spans) as step:
            if self._device_steps is not None:
                known, positions = [-1] * len(ends), [end - 1 for end in ends]
                return self._device_steps.logits(
                    StepTokens(last_ids, known, positions, range(len(ends)), None), step.spans
                )
            hidden_TD = self._decoder.forward(last_ids, step.spans, step.turns, picks=step.picks)
        return self._decoder.logits(hidden_TD)


def _draws(draft_requests: Sequence[DraftRequest]) -> list[list[RowDraw]] | None:
    """Return the parameters for drawing the tokens of each draft on the device. None: the host must draw some of
    them."""
    found = list[list[RowDraw]]()
    for request in draft_requests:
        draws = [request.row.sampler.row_draw(index) for index in range(request.num_drafts)]
        found.append([draw._replace(num_top=NO_LOGPROBS) for draw in draws if draw is not None])
        if len(found[-1]) < len(draws):
            return None
    return found
