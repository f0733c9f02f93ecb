"""Checks of Triton's decode attention over paged KV against the definition of attention in float64, query by query.

Everything that no query of a sequence attends to is NaN: other keys in its pages, unused pages, and padding tokens. B
sequences, T tokens, N heads, G KV heads, H head dim, P pages, S tokens per page, C pages per sequence, K selected keys.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import DecodeTiles
from tests.support.kernels.covering import Levels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_SPLIT_KEYS = 32
LEVELS: Levels = {
    "dtype": tuple(TOLERANCES),
    "most_queries": (1, 2, 3, 4, 5, 6, 7, 8),
    "group": (1, 2, 3, 4, 8, 16),
    "num_kv_heads": (1, 2, 3),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "page_tokens": (1, 5, 16, 32),
    "lengths": ("new", "edges", "ragged"),
    "num_picks": (0, 1, 20),
    "window": (None, 1, 9, 1000),
    "has_unseen": (False, True),
    "tile_keys": (None, 16, 32),
    "is_view": (False, True),
}
"""Levels of each field of DecodeCase."""


@dataclass(frozen=True)
class DecodeCase:
    """One call of decode attention."""

    dtype: torch.dtype = torch.float32
    most_queries: int = 3
    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 64
    page_tokens: int = 5
    lengths: str = "ragged"
    """Kind of sequences: with new tokens only, with lengths at page boundaries, of all kinds with padding between them,
    long, or with many new tokens after no or some other tokens."""
    num_picks: int = 0
    """Maximum number of keys that each KV head selects; 0: no selection."""
    window: int | None = None
    has_unseen: bool = False
    tile_keys: int | None = 16
    """Number of keys per tile; a split has 32 keys. None: chosen by the operator."""
    is_view: bool = False
    """True if queries and pages are views of larger tensors."""

    def __str__(self) -> str:
        values = [str(getattr(self, name)).removeprefix("torch.") for name in LEVELS]
        return "-".join(values)


@dataclass
class Step:
    """A case's tensors, on the CPU."""

    case: DecodeCase
    q_TNH: Tensor
    pages_PS2GH: Tensor
    table_BC: Tensor
    lengths: list[int]
    num_new: list[int]
    unseen: list[tuple[int, int]]
    picks: list[list[list[int]]] = field(default_factory=list)
    """Selected keys of each KV head of each sequence; empty: all keys."""

    def sees(self, row: int, kv_head: int, query: int) -> list[int]:
        """Return the keys to which a new token attends, by the definition."""
        position = self.lengths[row] - self.num_new[row] + query
        window = math.inf if self.case.window is None else self.case.window
        first, end = self.unseen[row]
        keys = range(self.lengths[row]) if not self.picks else self.picks[row][kv_head]
        return [key for key in keys if position - window < key <= position and not first <= key < end]

    def place(self, row: int, key: int) -> tuple[int, int]:
        """Return the page that holds a key, and the key's index within the page."""
        page_tokens = self.case.page_tokens
        return int(self.table_BC[row, key // page_tokens]), key % page_tokens


def check_decode(case: DecodeCase, device: str, spoilt: str = "") -> None:
    """Assert that the kernel's results equal the definition's. `spoilt`: name of an argument in SPOILERS that is
    falsified for the kernel; then the assertion must fail."""
    step = made(case)
    o_TNH = attended(step, device, spoilt)
    assert o_TNH.dtype == case.dtype
    expected_TNH = by_definition(step)
    num_tokens = sum(step.num_new)
    tolerance = TOLERANCES[case.dtype]
    o_TNH = o_TNH[:num_tokens].cpu().double()
    torch.testing.assert_close(o_TNH, expected_TNH[:num_tokens], atol=tolerance, rtol=tolerance)


def check_rows_alone(case: DecodeCase, device: str) -> None:
    """Assert that each sequence gets bitwise the same result alone and in the batch, which has other numbers of keys
    and of new tokens."""
    step = made(case)
    together_TNH = attended(step, device)
    start = 0
    for row, num_new in enumerate(step.num_new):
        own = slice(start, start + num_new)
        alone = Step(
            case,
            step.q_TNH[own],
            step.pages_PS2GH,
            step.table_BC[row : row + 1],
            step.lengths[row : row + 1],
            [num_new],
            step.unseen[row : row + 1],
            step.picks[row : row + 1],
        )
        o_TNH = attended(alone, device, capacity=max(step.lengths))
        assert torch.equal(o_TNH, together_TNH[own]), f"row {row}"
        start += num_new


def check_bad_number(part: int, device: str) -> None:
    """Assert that a NaN in a key (part 0) or a value (part 1) affects only the heads that read it."""
    case = DecodeCase(most_queries=1, lengths="edges")
    step = made(case)
    page, place = step.place(2, 4)
    step.pages_PS2GH[page, place, part, 1, 3] = math.nan
    o_TNH = attended(step, device)
    spoilt_TNH = torch.zeros(step.q_TNH.shape, dtype=torch.bool)
    spoilt_TNH[2, case.group :, 3 if part else slice(None)] = True
    num_tokens = sum(step.num_new)
    assert torch.equal(o_TNH.cpu().isnan()[:num_tokens], spoilt_TNH[:num_tokens])


def made(case: DecodeCase) -> Step:
    """Return random tensors of a case. Queries are large enough that attention is far from uniform."""
    random = torch.Generator().manual_seed(1)
    num_new, lengths = _rows(case)
    num_pages = [-(-length // case.page_tokens) for length in lengths]
    numbers = torch.randperm(sum(num_pages) + 2, generator=random).int()
    poisoned = int(numbers[-1])
    table_BC = torch.full((len(lengths), max(num_pages) + 2), poisoned, dtype=torch.int32)
    for row, own in enumerate(torch.split(numbers[:-2], num_pages)):
        table_BC[row, : len(own)] = own
    num_heads = case.num_kv_heads * case.group
    q_TNH = 2 * torch.randn(sum(num_new) + 2, num_heads + 3, case.head_dim, generator=random).to(case.dtype)
    q_TNH[sum(num_new) :] = math.nan
    q_TNH = q_TNH[:, 2 : num_heads + 2] if case.is_view else q_TNH[:, 2 : num_heads + 2].contiguous()
    shape = (len(numbers), 3 if case.is_view else 1, case.page_tokens, 2, case.num_kv_heads, case.head_dim)
    pages_PS2GH = torch.full(shape, math.nan, dtype=case.dtype)[:, -1]
    unseen = [_left_out(case, length, new) for length, new in zip(lengths, num_new, strict=True)]
    step = Step(case, q_TNH, pages_PS2GH, table_BC, lengths, num_new, unseen)
    if case.num_picks:
        step.picks = [[_picked(case, each, random) for _ in range(case.num_kv_heads)] for each in lengths]
    for row, new in enumerate(num_new):
        for kv_head in range(case.num_kv_heads):
            for key in sorted({key for query in range(new) for key in step.sees(row, kv_head, query)}):
                page, place = step.place(row, key)
                pages_PS2GH[page, place, :, kv_head] = torch.randn(2, case.head_dim, generator=random).to(case.dtype)
    return step


def attended(step: Step, device: str, spoilt: str = "", capacity: int | None = None) -> Tensor:
    """Return the kernel's results. `capacity`: maximum number of keys of a sequence of any step."""
    case = step.case
    table_BC, lengths, window = step.table_BC.clone(), torch.tensor(step.lengths, dtype=torch.int32), case.window
    starts_E = torch.tensor([sum(step.num_new[:row]) for row in range(len(lengths) + 1)], dtype=torch.int32)
    unseen_B2 = torch.tensor(step.unseen, dtype=torch.int32) if case.has_unseen else None
    if spoilt == "table":
        table_BC[-1, :2] = table_BC[-1, :2].flip(0)
    if spoilt == "lengths":
        lengths[-1] -= 1
    if spoilt == "starts":
        starts_E[1:-1] += 1
    if spoilt == "window":
        window = 8 if window is None else window + 1
    if spoilt == "unseen":
        unseen_B2 = None
    rows = StepRows(
        table_BC=table_BC.to(device),
        lengths_B=lengths.to(device),
        starts_E=starts_E.to(device),
        most_queries=max(*step.num_new, 1),
        most_keys=max(*step.lengths, 1),
        capacity_keys=capacity,
    )
    picks = _tensors(step, spoilt, device) if step.picks else None
    seen = SeenKeys(window, picks, None if unseen_B2 is None else unseen_B2.to(device))
    tiles = None
    if case.tile_keys is not None:
        tiles = DecodeTiles(64, case.tile_keys, _SPLIT_KEYS, num_warps=4)
    q_TNH, pages_PS2GH = step.q_TNH.to(device), step.pages_PS2GH.to(device)
    return decode_attention(q_TNH, pages_PS2GH, rows, seen, tiles=tiles)


SPOILERS = ("table", "lengths", "starts", "window", "unseen", "picks", "num_picks")
"""Names of the arguments that can be falsified."""


def by_definition(step: Step) -> Tensor:
    """Return the attention `[T, N, H]` in float64, computed for one query, one head and one key at a time."""
    o_TNH = torch.zeros(step.q_TNH.shape, dtype=torch.float64)
    token = 0
    for row, num_new in enumerate(step.num_new):
        for query in range(num_new):
            for head in range(step.q_TNH.shape[1]):
                kv_head = head // step.case.group
                places = [step.place(row, key) for key in step.sees(row, kv_head, query)]
                if places:
                    kv_K2H = torch.stack([step.pages_PS2GH[page, at, :, kv_head] for page, at in places]).double()
                    scores_K = kv_K2H[:, 0] @ step.q_TNH[token, head].double() / math.sqrt(step.case.head_dim)
                    o_TNH[token, head] = scores_K.softmax(0) @ kv_K2H[:, 1]
            token += 1
    return o_TNH


def check_append(case: DecodeCase, device: str) -> None:
    """Assert that new keys and values are stored bit for bit in their places in the pages, and that no other byte
    changed. The first token and the last token belong to no sequence."""
    step = made(case)
    random = torch.Generator().manual_seed(2)
    shape = (len(step.q_TNH), 2 * case.num_kv_heads + 1, case.head_dim)
    kv_TXH = torch.randn(shape, generator=random).to(case.dtype)
    k_TGH, v_TGH = kv_TXH[:, : case.num_kv_heads], kv_TXH[:, case.num_kv_heads + 1 :]
    expected_PS2GH, slots = step.pages_PS2GH.clone(), [-1]
    for row, (length, num_new) in enumerate(zip(step.lengths, step.num_new, strict=True)):
        for key in range(length - num_new, length):
            page, place = step.place(row, key)
            expected_PS2GH[page, place] = torch.stack((k_TGH[len(slots)], v_TGH[len(slots)]))
            slots.append(page * case.page_tokens + place)
    slots_U = torch.tensor(slots, dtype=torch.int32, device=device)
    pages_PS2GH = step.pages_PS2GH.to(device)
    append_kv(k_TGH.to(device), v_TGH.to(device), pages_PS2GH, slots_U)
    assert torch.equal(_bits(pages_PS2GH.cpu()), _bits(expected_PS2GH))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _rows(case: DecodeCase) -> tuple[list[int], list[int]]:
    """Return the numbers of new tokens and the lengths of the sequences. Both are 0 for a padding sequence."""
    most, page = case.most_queries, case.page_tokens
    if case.lengths == "new":
        num_new = [most, 1, max(most // 2, 1)]
        return num_new, num_new
    if case.lengths == "edges":
        num_new = [1, most, most]
        pages = -(-most // page)
        return num_new, [page, pages * page + 1, (pages + 1) * page - 1]
    if case.lengths == "first chunks":
        return [17, 1, 40], [17, 1, 40]
    if case.lengths == "later chunks":
        return [33, 20, 3], [64, 87, 40]
    if case.lengths == "long":
        return [most, 1, 1], [600, 257, 256]
    return [most, 0, 1, max(most - 1, 1), 0], [71, 0, 1, 33 + most, 0]


def _left_out(case: DecodeCase, length: int, num_new: int) -> tuple[int, int]:
    """Return the range of keys that are excluded from attention: the middle half of the keys before the new ones."""
    old = length - num_new
    return (old // 4, old - old // 4) if case.has_unseen else (0, 0)


def _picked(case: DecodeCase, length: int, random: torch.Generator) -> list[int]:
    num = min(length, int(torch.randint(1, case.num_picks + 1, (), generator=random)))
    return sorted(torch.randperm(length, generator=random)[:num].tolist())


def _tensors(step: Step, spoilt: str, device: str) -> tuple[Tensor, Tensor]:
    """Return the selected keys and their numbers as tensors. Entries after the end of a list are invalid: -1, or a key
    that is not in the list."""
    keys_BGK = torch.full((len(step.lengths), step.case.num_kv_heads, step.case.num_picks), -1, dtype=torch.int32)
    keys_BGK[:, :, 1::2] = 0
    num_BG = torch.zeros(keys_BGK.shape[:2], dtype=torch.int32)
    for row, lists in enumerate(step.picks):
        for kv_head, keys in enumerate(lists):
            keys_BGK[row, kv_head, : len(keys)] = torch.tensor(keys, dtype=torch.int32)
            num_BG[row, kv_head] = len(keys)
    if spoilt == "picks":
        keys_BGK = keys_BGK.flip(1)
    if spoilt == "num_picks":
        num_BG -= 1
    return keys_BGK.to(device), num_BG.to(device)
