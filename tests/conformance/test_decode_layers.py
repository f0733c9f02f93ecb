"""All layers in one native call against the operators one by one: the same bits, on every path through the kernels."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.fused_layers import FusedLayers
from baton.modeling.forward.linear import PanelLinear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import RmsNorm, Transform, unchanged
from baton.modeling.forward.rope import Rotation
from baton.modeling.forward.selection import StepPicks
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.codes import StoredWeight
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from baton.modeling.kv.buffers import KvPlace
from baton.types import TokenRange
from tests.support.kernels.paths import INSTRUCTION_SETS, has_tiles, lane, require


@dataclass(frozen=True)
class Path:
    """Instruction set that kernels are built for, and their ways to multiply."""

    instruction_set: str
    linears: str = WIDENED
    attention: str = WIDENED

    def __str__(self) -> str:
        return f"{self.instruction_set}-{self.linears}-{self.attention}"


needs_tiles = pytest.mark.skipif(not has_tiles(), reason="needs AMX")
PATHS = [
    *(pytest.param(Path(each), id=str(Path(each)), marks=lane(each)) for each in INSTRUCTION_SETS),
    pytest.param(Path(native.NATIVE, DOT, DOT), id="dot"),
    pytest.param(Path(native.NATIVE, TILES, TILES), id="tiles", marks=needs_tiles),
]
SHAPES = [
    pytest.param((64, 88, 2, 2, 32), id="mha"),
    pytest.param((72, 200, 6, 2, 64), id="gqa"),
    pytest.param((100, 33, 14, 2, 32), id="gqa7"),
    pytest.param((96, 64, 17, 1, 32), id="mqa17"),
]
"""Hidden size, intermediate size, heads, kv heads, head dim."""
NUM_LAYERS = 3
LENGTHS = (1, 2, 17, 64, 65, 700, 1100)
"""Lengths of rows, in turn, with their new keys."""

pytestmark = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(autouse=True)
def loaded(path: Path) -> None:
    """The kernels are there: built at their first use."""
    require(path.instruction_set)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def quantised(weight_NK: Tensor, bits: int) -> StoredWeight:
    """A weight of this shape with random codes, and scales and offsets for groups of 32 inputs."""
    (N, K), generator = weight_NK.shape, torch.Generator().manual_seed(bits)
    lowest, dtype = (-128, torch.int8) if bits == 8 else (0, torch.uint8)
    codes_NK = torch.randint(lowest, lowest + (1 << bits), (N, K), generator=generator, dtype=dtype)
    scales_NGF = torch.randn(N, K // 32, 2, generator=generator) / (K**0.5 * (1 << (bits - 1)))
    return StoredWeight(bits, codes_NK, scales_NGF.half())


def config_of(shape: tuple[int, int, int, int, int]) -> ModelConfig:
    hidden, inner, num_heads, num_kv_heads, head_dim = shape
    return ModelConfig("llama", 10, NUM_LAYERS, hidden, inner, num_heads, num_kv_heads, head_dim, 2048, False)


class Pieces:
    """Random layers, and a batch of rows; whoever runs the layers is handed copies of what they write to."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        num_rows: int,
        *,
        int8: bool = False,
        num_new: int = 1,
        unseen: bool = False,
        picked: bool = False,
        stored: Collection[int] = (),
    ) -> None:
        """`num_new`: tokens of a sequence, of which there are as many as fit; `unseen`: whether rows leave out keys;
        `picked`: whether they attend to keys that they pick, others in each layer; `stored`: layers with quantised
        weights, as they are stored."""
        self.num_new, self.unseen = num_new, unseen
        self.path, self.config, self.num_rows = path, config, num_rows
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self.width, self.kv_width = width, config.num_kv_heads * config.head_dim
        self.linears: list[tuple[PanelLinear, Transform]] = []
        shapes = (width + 2 * self.kv_width, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)
        for layer in range(NUM_LAYERS):
            for index, (num_outputs, num_inputs) in enumerate(shapes):
                seed = 10 * layer + index
                weight_NK = random(num_outputs, num_inputs, seed=seed, scale=num_inputs**-0.5)
                bias_N = random(num_outputs, seed=seed + 100) if layer == 1 else None
                gain_K = random(num_inputs, seed=seed + 200)
                weight = quantised(weight_NK, (4, 6, 8)[index % 3]) if layer in stored else weight_NK
                linear = PanelLinear(
                    *(weight, bias_N, index == 2),
                    int8=int8,
                    product=path.linears,
                    instruction_set=path.instruction_set,
                )
                self.linears.append((linear, unchanged if index % 2 else RmsNorm(gain_K, 1e-5)))
        self.hidden_TD = random(num_rows, hidden, seed=7, scale=3)
        cos_T1H, sin_T1H = (random(num_rows, 1, config.head_dim, seed=seed) for seed in (8, 9))
        self.rotation = Rotation(cos_T1H, sin_T1H, in_place=True)
        num_spans = num_rows // num_new
        self.lengths = [num_new - 1 + LENGTHS[row % len(LENGTHS)] for row in range(num_spans)]
        self.caches = [
            random(NUM_LAYERS, length, 2, config.num_kv_heads, config.head_dim, seed=300 + row)
            for row, length in enumerate(self.lengths)
        ]
        self.picks = self._picks() if picked else None

    def _picks(self) -> StepPicks:
        """About half of the keys, the row's own among them."""
        num_kv_heads, num_B = self.config.num_kv_heads, [length // 2 + 1 for length in self.lengths]
        keys_LBGK = torch.full((NUM_LAYERS, self.num_rows, num_kv_heads, max(num_B)), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(11)
        for row, (length, num) in enumerate(zip(self.lengths, num_B, strict=True)):
            for layer in range(NUM_LAYERS):
                for g in range(num_kv_heads):
                    others = torch.randperm(length - 1, generator=generator)[: num - 1]
                    keys = torch.cat((others, torch.tensor([length - 1]))).sort().values
                    keys_LBGK[layer, row, g, : len(keys)] = keys
        return StepPicks(keys_LBGK, torch.tensor(num_B, dtype=torch.int32).unsqueeze(1).repeat(1, num_kv_heads))

    def rows(self, caches: list[Tensor]) -> DecodeRows:
        num = self.num_new
        keys = [
            TokenRange(1, each.shape[1] - num) if self.unseen and each.shape[1] > num + 2 else None for each in caches
        ]
        places = [
            KvPlace(each.data_ptr(), each[0].nbytes, NUM_LAYERS, each.shape[1], num, unseen)
            for each, unseen in zip(caches, keys, strict=True)
        ]
        spans = [(index * num, place) for index, place in enumerate(places)]
        return DecodeRows(spans, 4 * self.kv_width, (None,) * NUM_LAYERS)

    def layers(self) -> FusedLayers:
        """All linears as one."""
        return FusedLayers(
            self.linears,
            self.config,
            attention_product=self.path.attention,
            instruction_set=self.path.instruction_set,
        )

    def fused(self, layers: FusedLayers) -> tuple[Tensor, list[Tensor]]:
        """Hidden states and caches after one call."""
        hidden_TD, caches = self.hidden_TD.clone(), [each.clone() for each in self.caches]
        rows = self.rows(caches)
        assert layers.fit(rows, self.num_rows)
        return layers.run(hidden_TD, self.rotation, rows, self.picks), caches

    def one_by_one(self) -> tuple[Tensor, list[Tensor]]:
        """The same by the operators alone."""
        hidden_TD, caches = self.hidden_TD.clone(), [each.clone() for each in self.caches]
        operators = native.operators(self.path.instruction_set)
        config, rows = self.config, self.rows(caches)
        keys = rows.keys
        assert keys is not None
        splits = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        for layer in range(NUM_LAYERS):
            (qkv, norm), (output, _), (gate_up, mlp_norm), (down, _) = self.linears[4 * layer : 4 * layer + 4]
            qkv_TKH = qkv(hidden_TD, norm).view(self.num_rows, -1, config.head_dim)
            operators.turn_heads(qkv_TKH[:, : sum(splits[:2])], self.rotation.cos_T1H, self.rotation.sin_T1H)
            q_TNH, k_TGH, v_TGH = torch.split(qkv_TKH, splits, dim=1)
            operators.append_kv(k_TGH, v_TGH, keys.addresses_B[layer], keys.lengths_B)
            chosen = None if self.picks is None else (self.picks.keys_LBGK[layer], self.picks.num_BG)
            attended_TNH = operators.decode_attention(
                q_TNH,
                keys._replace(addresses_B=keys.addresses_B[layer]),
                config.num_kv_heads,
                self.path.attention,
                chosen,
            )
            hidden_TD = output(attended_TNH.flatten(1), residual_TN=hidden_TD)
            hidden_TD = down(gate_up(hidden_TD, mlp_norm), residual_TN=hidden_TD)
        return hidden_TD, caches

    def check(self, num_callers: int = 1) -> None:
        """Check with so many threads that call the same layers at a time."""
        layers = self.layers()
        expected_TD, expected = self.one_by_one()
        assert expected_TD.isfinite().all()
        with ThreadPoolExecutor(num_callers) as pool:
            for hidden_TD, caches in pool.map(self.fused, [layers] * num_callers):
                assert torch.equal(hidden_TD, expected_TD)
                assert all(torch.equal(cache, other) for cache, other in zip(caches, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 13, 16, 17, 32, 33, 48, 49, 150])
def test_one_call_makes_the_bits_of_many(
    path: Path, num_rows: int, shape: tuple[int, int, int, int, int], two_threads: None
) -> None:
    Pieces(path, config_of(shape), num_rows).check()


@pytest.mark.parametrize("num_rows", [1, 9, 33])
def test_one_call_makes_the_same_bits_of_int8_weights(path: Path, num_rows: int, two_threads: None) -> None:
    Pieces(path, config_of((72, 200, 6, 2, 64)), num_rows, int8=True).check()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("stored", [(0, 1, 2), (0,), (1,), (1, 2)])
def test_one_call_makes_the_same_bits_of_stored_weights(
    path: Path, num_rows: int, stored: tuple[int, ...], two_threads: None
) -> None:
    """Also if only some layers have them, as in files of several types."""
    Pieces(path, config_of((96, 160, 3, 1, 32)), num_rows, stored=stored).check()


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("num_new", [1, 2, 5, 8])
def test_one_call_makes_the_same_bits_of_several_tokens_a_sequence(
    path: Path, num_new: int, unseen: bool, two_threads: None
) -> None:
    Pieces(path, config_of((72, 200, 6, 2, 64)), 40, num_new=num_new, unseen=unseen).check()


def test_one_call_makes_the_same_bits_of_picked_keys(path: Path, two_threads: None) -> None:
    Pieces(path, config_of((72, 200, 6, 2, 64)), 9, picked=True).check()


def test_a_pick_that_is_no_key_of_its_row_is_refused(path: Path) -> None:
    pieces = Pieces(path, config_of((64, 88, 2, 2, 32)), 3, picked=True)
    assert pieces.picks is not None
    pieces.picks.keys_LBGK[2, 1, 1, 0] = pieces.lengths[1]
    with pytest.raises(RuntimeError, match="a key is picked that its row does not have"):
        pieces.fused(pieces.layers())


def test_several_callers_at_a_time_get_the_same_bits(path: Path, two_threads: None) -> None:
    Pieces(path, config_of((72, 200, 6, 2, 64)), 9).check(num_callers=3)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads_makes_the_same_bits(path: Path, num_threads: int) -> None:
    """More than there are panels, or rows, or processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (1, 7):
            Pieces(path, config_of((32, 16, 1, 1, 32)), num_rows).check()
    finally:
        torch.set_num_threads(before)


def test_layers_that_do_not_fit_are_refused(path: Path) -> None:
    pieces = Pieces(path, config_of((64, 88, 2, 2, 32)), 1)
    pieces.linears[6:8] = pieces.linears[2:4][::-1]
    with pytest.raises(RuntimeError, match="does not fit the heads or the layers before it"):
        pieces.layers()


def test_a_row_without_a_key_is_refused(path: Path) -> None:
    pieces = Pieces(path, config_of((64, 88, 2, 2, 32)), 2)
    rows = pieces.rows(pieces.caches)
    assert rows.keys is not None
    rows.keys.lengths_B[1] = 0
    with pytest.raises(RuntimeError, match="every row has a key"):
        pieces.layers().run(pieces.hidden_TD, pieces.rotation, rows)
