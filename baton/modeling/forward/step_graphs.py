"""Steps that run entirely on a device. KV is in pages, and tokens are drawn on the device without the host.

`StepGraphs` runs the steps of `generate_workers.engine.model_runner`, in which sequences decode one token, verify
drafts, or prefill a chunk of their prompt, and the draft steps of `generate_workers.speculation.self_drafts`. The host
writes the inputs in one copy before the step, and reads the tokens once after it. It may launch further steps before it
has read the tokens of this one, because a step finds the tokens of the steps before it on the device.

The forward pass is captured in a CUDA graph for each of several shapes. Replaying a graph launches hundreds of kernels
at once. A step runs in the smallest graph that it fits into. A step that fits into none, such as one with a very long
chunk, is launched kernel by kernel. So is the drawing, which needs few kernels. Without capturing, for example in
Triton's interpreter, the same forward passes are launched kernel by kernel.

Shape letters: T tokens, R results, L layers, P pages, S tokens of a page, V vocabulary size, G kv heads, N heads, H
head dim, D hidden size.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.limits import MAX_DRAFTS, MAX_LOGPROBS
from baton.modeling.device.sending import to_device
from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.forward.drawing import NO_LOGPROBS, NO_TOKEN, Draws, RowDraw, choose_tokens
from baton.modeling.forward.sampling import log_probabilities, token_of
from baton.modeling.forward.triton.step_inputs import StepInputs, StepShape, StepTokens, input_bytes
from baton.modeling.forward.triton.triton_rows import arrays_of
from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.spans import span_attention, tiles_for
from baton.modeling.kernels.triton.tiles import MOST_QUERIES, decode_tiles, power_of_two
from baton.types import SampledToken

_WARM_UPS = 2
"""Number of warm-up steps before a capture. In these steps kernels are compiled and libraries allocate memory, which is
not allowed during a capture."""
_IN_FLIGHT = 1 + MAX_DRAFTS
"""Maximum number of launched steps whose tokens the host has not read: draft steps, and the step that verifies their
drafts."""
_LOGIT_BYTES = 12
"""Estimated number of device bytes per logit in a step with filters: 6 bytes for the logits in bf16 and fp32. The
sampler's histograms have 98 kB for each row, which is at most 6 bytes for each of 16,384 tokens or more."""
_VERIFIED_TOKENS = (2, 4, 9)
"""Numbers of new tokens per sequence of captured steps that verify drafts: 1, 3 and 8 drafts, and the token before
them."""
_MOST_VERIFIED = 256
"""Maximum number of new tokens of captured steps that verify drafts, unless there are more slots. The logits of all of
these tokens take memory."""
_REPORTED_ROWS = 16
"""Number of results whose logprobs are computed at once. Each needs 24 bytes for each token of the vocabulary."""
_MIXED_TOKENS = (64, 128, 256, 512, 1024)
"""Numbers of new tokens of captured steps that also prefill. Steps with more tokens take longer than launching their
kernels one by one."""
_MOST_SPANS = 8
"""Maximum number of sequences that prefill more than MOST_QUERIES tokens in a captured step."""


def step_shapes(
    decoder: Decoder, num_slots: int, max_prefill_tokens: int = 0, *, drafts: bool = False
) -> list[StepShape]:
    """Return the shapes of the steps that an engine captures, at most 64, those with the fewest tokens first.
    `num_slots`: maximum number of sequences. `max_prefill_tokens`: maximum number of tokens that a step normally
    prefills; 0: no captured step prefills. `drafts`: steps may verify drafts."""
    sizes = [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots] + [num_slots]
    shapes = [StepShape(size, size, size, 1, size) for size in sizes]
    for queries in _VERIFIED_TOKENS if drafts else ():
        most = min(max(_MOST_VERIFIED, num_slots) // queries, num_slots)
        verifying = [size for size in sizes if size < most] + [most]
        shapes += [StepShape(size * queries, size * queries, size, queries, size * queries) for size in verifying]
    group = decoder.config.num_heads // decoder.config.num_kv_heads
    tile_rows = tiles_for(decoder.config.head_dim, decoder.dtype, decoder.weights.device).rows
    most_tokens = power_of_two(max_prefill_tokens + num_slots) if max_prefill_tokens else 0
    for num_tokens in [each for each in _MIXED_TOKENS if each <= most_tokens]:
        num_few = min(num_slots + MOST_QUERIES, num_tokens)
        num_blocks = -(-num_tokens * group // tile_rows) + _MOST_SPANS
        mixed = num_tokens, min(num_slots, num_tokens - 1), num_slots, MOST_QUERIES, num_few
        shapes.append(StepShape(*mixed, _MOST_SPANS + 1, num_blocks))
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_spans, shape.num_rows))


def step_bytes(decoder: Decoder, shapes: Sequence[StepShape], row_pages: int, page_tokens: int) -> int:
    """Return an estimate of the device memory in bytes that steps of these shapes need, in addition to weights and KV.
    Each sequence has at most `row_pages` pages. The estimate includes the inputs, the memory of sampling, the
    activations of a layer, and results of splits of keys. All captured steps share this memory."""
    config = decoder.config
    widest = (
        3 * config.num_active_experts * config.intermediate_size
        + 4 * config.hidden_size
        + 4 * config.num_heads * config.head_dim
    )
    most_keys, group = row_pages * page_tokens, config.num_heads // config.num_kv_heads
    num_splits = -(-most_keys // decode_tiles(config.head_dim, decoder.dtype, group, most_keys).split_keys)
    return max(
        input_bytes(shape, row_pages)
        + shape.num_results * _LOGIT_BYTES * config.vocab_size
        + shape.num_tokens * decoder.dtype.itemsize * widest
        + shape.num_few_tokens * config.num_heads * num_splits * 4 * (config.head_dim + 1)
        for shape in shapes
    )


class PendingTokens:
    """Tokens that a launched step draws."""

    def __init__(self, first: int, results: "_Results", tops: Sequence[int], wait: Callable[[], None]) -> None:
        """`results`: host memory to which the step copies its results. `tops`: `RowDraw.num_top` of each result.
        `wait`: waits until it is done."""
        self.first = first
        """Place of the first of these tokens among the tokens that steps draw (`StepTokens.sources`). The others follow
        it."""
        self._results, self._tops, self._wait = results, tops, wait
        self._found: list[SampledToken] | None = None

    def result(self) -> list[SampledToken]:
        """Wait for the step, and return the token that follows each of its results. Must be called before the ninth
        step after this one is launched, because that step uses the same memory. Later calls return the same list."""
        if self._found is None:
            self._wait()
            self._found = self._results.tokens(self._tops)
        return self._found


@dataclass(frozen=True)
class StartedStep:
    """Step whose forward pass was launched, and whose tokens are not drawn yet."""

    draw: Callable[[Sequence[RowDraw], Callable[[Tensor], None]], PendingTokens]
    """Launches the drawing. Its arguments are the parameters for drawing a token from each result, and a function that
    first changes the logits of the results in place. All earlier steps must have been read."""


class StepGraphs:
    """Steps of several shapes, captured in CUDA graphs. The KV of all sequences must be in the pages of one pool. Used
    by one thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        pages_LPS2GH: Tensor,
        row_pages: int,
        shapes: Sequence[StepShape],
        *,
        captures: bool = True,
    ) -> None:
        """Capture a forward pass in a CUDA graph for each shape. Each sequence has at most `row_pages` pages. The
        largest step is captured first, because all graphs share its memory. Steps that fit into no shape may have as
        many results as all sequences of the largest shape can have with drafts.

        If `captures` is False, nothing is captured, and steps are launched kernel by kernel. If there is too little
        memory, raises one of the errors in OUT_OF_MEMORY. Blocks.
        """
        self._decoder, self._pages_LPS2GH = decoder, pages_LPS2GH
        self.captures = captures
        """True if steps replay CUDA graphs, and False if their kernels are launched one by one."""
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads
        self._tiles = tiles_for(decoder.config.head_dim, pages_LPS2GH.dtype, pages_LPS2GH.device)
        self._most_keys = row_pages * pages_LPS2GH.shape[2]
        device, num_bytes = pages_LPS2GH.device, max(input_bytes(shape, row_pages) for shape in shapes)
        self._homes = [_host(num_bytes, torch.uint8, device) for _ in range(_IN_FLIGHT)]
        """Inputs in host memory. Steps use them in rotation, because the device may not have copied those of the step
        before when the host writes the next ones."""
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        most_results = max(shape.num_rows for shape in shapes) * max(_VERIFIED_TOKENS)
        sizes = max(shape.num_results for shape in shapes), decoder.config.vocab_size
        self._logits_RV = torch.zeros(sizes, device=device)
        """Logits of the latest step that fitted into a shape, fp32. All graphs write to it."""
        self._results = [_Results.of(most_results, device) for _ in range(_IN_FLIGHT)]
        self._chosen_FR = torch.zeros(_IN_FLIGHT, most_results, dtype=torch.int64, device=device)
        """Tokens that the latest steps draw. Steps use the rows in rotation."""
        self._num_launched = 0
        self.shapes = sorted(shapes, key=lambda shape: shape.num_tokens)
        """Shapes for which steps exist, those with the fewest tokens first."""
        self._written = {
            shape: [StepInputs.over(home, shape, row_pages) for home in self._homes] for shape in self.shapes
        }
        self._inputs = {shape: StepInputs.over(self._there, shape, row_pages) for shape in self.shapes}
        self._input_bytes = {shape: input_bytes(shape, row_pages) for shape in self.shapes}
        self._forwards = dict[StepShape, Callable[[], Tensor]]()
        capture = _Capture(device) if captures else None
        for shape in reversed(self.shapes):
            run: Callable[[], Tensor] = functools.partial(self._forward, shape)
            if capture is not None:
                self._there.zero_()
                self._inputs[shape].slots_T.fill_(-1)  # the steps before a capture write no keys
                run = capture(run)
            self._forwards[shape] = run

    @torch.inference_mode()
    def launch(self, tokens: StepTokens, spans: Sequence[SequenceSpan]) -> PendingTokens:
        """Launch one step that draws its tokens, and return them. They may not be drawn yet. `spans`: for each
        sequence, its new tokens in the order of `tokens`, and its pages. The step writes the KV of the new tokens. If
        it fits into a shape, it also attends to keys that a span leaves out, unless their whole page is left out. At
        most eight earlier steps may still be unread. On a CPU, the step has ended when the method returns."""
        assert tokens.draws is not None
        turn, forward = self._num_launched % _IN_FLIGHT, self._prepared(tokens, spans)
        return self._drawn(turn, tokens.draws, forward)

    @torch.inference_mode()
    def start(self, tokens: StepTokens, spans: Sequence[SequenceSpan]) -> "StartedStep":
        """Launch the forward pass of one step, whose tokens are drawn later. `spans`: as in `launch`. Only the step
        before may still be unread, because the logits of all steps are in the same memory."""
        turn, forward = self._num_launched % _IN_FLIGHT, self._prepared(tokens, spans)
        found = list[Tensor]()

        @torch.inference_mode()
        def work() -> None:
            found.append(forward()[0])

        self._queue(work)

        def draw(draws: Sequence[RowDraw], adjust: Callable[[Tensor], None]) -> PendingTokens:
            def adjusted() -> tuple[Tensor, Draws]:
                adjust(found[0])
                return found[0], Draws.of(draws, self._there.device)

            return self._drawn(turn, draws, adjusted)

        return StartedStep(draw)

    @torch.inference_mode()
    def logits(self, tokens: StepTokens, spans: Sequence[SequenceSpan]) -> Tensor:
        """Launch one step, and return the logits of its results, `[R, V]`, fp32. They are valid until the next step is
        launched. `spans`: as in `launch`. Only draft steps may still be unread."""
        logits_RV, _ = self._prepared(tokens, spans)()
        return logits_RV

    def _drawn(
        self, turn: int, draws: Sequence[RowDraw], forward: Callable[[], tuple[Tensor, Draws | None]]
    ) -> PendingTokens:
        """Launch the drawing of tokens. `forward` returns the logits and the parameters for drawing. `turn`: number of
        the host memory for the tokens."""
        chosen_R, results = self._chosen_FR[turn][: len(draws)], self._results[turn]
        vocab_size = self._decoder.config.vocab_size
        kind = max((draw.kind(vocab_size) for draw in draws), default=None)
        tops = [min(draw.num_top, vocab_size) for draw in draws]

        @torch.inference_mode()
        def work() -> None:
            logits_RV, drawing = forward()
            if kind is not None:
                assert drawing is not None
                chosen_R.copy_(choose_tokens(logits_RV, drawing, kind))
                results.copy(chosen_R, logits_RV, tops)

        return PendingTokens(turn * self._chosen_FR.shape[1], results, tops, self._queue(work))

    def _prepared(self, tokens: StepTokens, spans: Sequence[SequenceSpan]) -> Callable[[], tuple[Tensor, Draws | None]]:
        """Write the inputs of a step, and return a function that runs its forward pass on the device. The function
        returns the logits of the results, and the parameters for drawing tokens."""
        turn, self._num_launched = self._num_launched % _IN_FLIGHT, self._num_launched + 1
        firsts, first = list[int](), 0
        for span in spans:
            firsts.append(first)
            first += len(span.tokens)
        places = [place.without_unseen() for span in spans if (place := span.place()) is not None]
        rows = arrays_of(list(zip(firsts, places, strict=True)), self._group, self._tiles.rows)
        shape = next((shape for shape in self.shapes if shape.fits(tokens, rows)), None)
        num_results = len(tokens.results)
        if shape is None:
            return functools.partial(self._launched, tokens, spans)
        self._written[shape][turn].write(tokens, rows)
        num_bytes, inputs, run = self._input_bytes[shape], self._inputs[shape], self._forwards[shape]

        def forward() -> tuple[Tensor, Draws | None]:
            self._there[:num_bytes].copy_(self._homes[turn][:num_bytes], non_blocking=True)
            logits_RV = run()
            if not shape.selects and list(tokens.results) != list(range(num_results)):
                logits_RV = logits_RV[inputs.results_R[:num_results]]
            return logits_RV[:num_results], inputs.draws.first(num_results)

        return forward

    def _launched(self, tokens: StepTokens, spans: Sequence[SequenceSpan]) -> tuple[Tensor, Draws | None]:
        """Run a forward pass whose kernels are launched one by one."""
        device = self._there.device
        token_ids_T, sources_T = (to_device(torch.tensor(each), device) for each in (tokens.token_ids, tokens.sources))
        token_ids_T = self._known(token_ids_T, sources_T)
        hidden_RD = self._decoder.forward(token_ids_T, spans, most_queries=MOST_QUERIES, results=tokens.results)
        draws = Draws.of(tokens.draws, device) if tokens.draws else None
        return self._decoder.logits(hidden_RD) if tokens.results else hidden_RD, draws

    def _queue(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work on the device, and return a function that waits until it is done."""
        work()
        if not self._there.is_cuda:
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    @torch.inference_mode()
    def _forward(self, shape: StepShape) -> Tensor:
        """Run the forward pass of a shape with its present inputs, and return the logits of its results."""
        decoder, inputs = self._decoder, self._inputs[shape]
        few, many = inputs.few_rows(shape, self._most_keys), inputs.many_rows(shape, self._most_keys, self._tiles)
        positions = decoder.weights.positions.lookup(inputs.positions_T)
        hidden_TD = decoder.enter(self._known(inputs.token_ids_T, inputs.sources_T), positions)
        for layer, pages_PS2GH in enumerate(self._pages_LPS2GH):
            q_TNH, k_TGH, v_TGH = decoder.heads(layer, hidden_TD, positions)
            append_kv(k_TGH, v_TGH, pages_PS2GH, inputs.slots_T)
            window = decoder.config.windows[layer]
            o_TNH = decode_attention(q_TNH, pages_PS2GH, few, SeenKeys(window))
            if many is not None:
                span_attention(q_TNH, pages_PS2GH, many, window=window, o_TNH=o_TNH)
            if shape.selects and layer == decoder.config.num_layers - 1:  # only the results are left
                hidden_TD, o_TNH = hidden_TD[inputs.results_R], o_TNH[inputs.results_R]
            hidden_TD = decoder.complete(layer, hidden_TD, o_TNH)
        logits_RV = decoder.weights.head(hidden_TD, decoder.weights.final_norm)
        return self._logits_RV[: shape.num_results].copy_(logits_RV)

    def _known(self, token_ids_T: Tensor, sources_T: Tensor) -> Tensor:
        """Return the tokens of a step, including those that earlier steps draw. A sequence whose logits were not finite
        has no token, and gets token 0: the host ends it."""
        drawn_T = self._chosen_FR.view(-1)[sources_T.clamp(min=0)].clamp(min=0)
        return torch.where(sources_T < 0, token_ids_T, drawn_T)


def _host(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for copies to and from a device, all 0."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass(frozen=True)
class _Results:
    """Host memory for the results of a step."""

    token_ids_R: Tensor
    logprobs_X: Tensor
    """Results of `log_probabilities`, float64, for all results of a step with logprobs, one after another."""

    @classmethod
    def of(cls, most_results: int, device: torch.device) -> "_Results":
        """Make memory for steps with up to `most_results` results."""
        logprobs_X = _host(most_results * 2 * (1 + MAX_LOGPROBS), torch.float64, device)
        return cls(_host(most_results, torch.int64, device), logprobs_X)

    def copy(self, chosen_R: Tensor, logits_RV: Tensor, tops: Sequence[int]) -> None:
        """Copy the drawn tokens from the device, with logprobs for the results whose number of most likely tokens in
        `tops` is not NO_LOGPROBS. Does not wait for the device."""
        self.token_ids_R[: len(chosen_R)].copy_(chosen_R, non_blocking=True)
        asked, width = _asked(tops)
        for first in range(0, len(asked), _REPORTED_ROWS):
            rows = to_device(torch.tensor(asked[first : first + _REPORTED_ROWS]), chosen_R.device)
            found_X = log_probabilities(logits_RV[rows], chosen_R[rows].clamp(min=0), width - 1).view(-1)
            start = first * 2 * width
            self.logprobs_X[start : start + len(found_X)].copy_(found_X, non_blocking=True)

    def tokens(self, tops: Sequence[int]) -> list[SampledToken]:
        """Return the tokens. They must have been copied."""
        token_ids, (asked, width) = self.token_ids_R[: len(tops)].tolist(), _asked(tops)
        found = list(map(SampledToken, token_ids))
        reported = self.logprobs_X[: len(asked) * 2 * width].view(len(asked), 2, width).tolist()
        for row, each in zip(asked, reported, strict=True):
            if token_ids[row] != NO_TOKEN:
                found[row] = token_of(token_ids[row], [numbers[: 1 + tops[row]] for numbers in each])
        return found


def _asked(tops: Sequence[int]) -> tuple[list[int], int]:
    """Return the indices of the results with logprobs, and the largest number of logprobs of a result."""
    return [row for row, top in enumerate(tops) if top != NO_LOGPROBS], 1 + max(tops, default=0)


class _Capture:
    """Captures functions in CUDA graphs that share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that replays `run` with the current contents of its tensors, and returns its result."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
