"""The C++ kernels of residency policies that keep or read KV selectively, as operations on tensors.

`operators` has the other kernels. Rows' memory is passed as addresses, int64 on the CPU. B rows, T tokens, N heads, G
kv heads, H head dim, R columns of partial keys, at most K selected keys, S keys.
"""

import ctypes

import torch
from torch import Tensor, get_num_threads

from baton.modeling.kernels.calls.checks import FLOATS, numbers, optional, require
from baton.modeling.kernels.calls.library import Library

_LISTS = "picks must be [B, G, K] int32, contiguous"
_NUMBERS = "numbers of picks must be [B, G] int32, contiguous"


class SparseOperators:
    """Kernels of the folder `sparse`, built for one instruction set."""

    def __init__(self, library: Library) -> None:
        self._admit_picks = library.function("admit_picks", "ppnnnpppppnnpppt")
        self._copy_heads = library.function("copy_heads", "ppppnnnn")
        self._copy_rows = library.function("copy_rows", "ppnn")
        self._select_keys = library.function("select_keys", "ppppnnnnnddnnnpnpppt")
        self._project_keys = library.function("project_keys", "ppnnnnppppbb")
        self._note_picks = library.function("note_picks", "ppnnnpnppnnnnnpt")
        self._pack_kv = library.function("pack_kv", "pppnnnb")
        self._unpack_kv = library.function("unpack_kv", "pppnnnbt")
        self._unpack_picked_kv = library.function("unpack_picked_kv", "pppppnnnnnbpt")

    def admit_picks(
        self,
        picks_BGK: Tensor,
        num_BG: Tensor,
        records_B: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        sizes: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the place of each selected key in its row's area, `[B, G, K]`, the missing keys as pairs of key and
        place, `[B, G, K, 2]`, and their number, `[B, G]` (sparse/hot_keys.cpp).

        `rows`: numbers of slots, first of the latest keys, numbers of tokens, and whether a row is fresh. `sizes`:
        places of the latest keys, and most slots."""
        num_slots_B, latest_B, num_tokens_B, is_fresh_B = rows
        require(picks_BGK.dim() == 3, _LISTS)
        B, G, K = picks_BGK.shape
        places_BGK, num_missing_BG = torch.empty_like(picks_BGK), torch.empty_like(num_BG)
        missing_BGK2 = torch.empty((B, G, K, 2), dtype=torch.int32)
        is_fresh = numbers(is_fresh_B, torch.bool, B, "rows are fresh or not, contiguous")
        self._admit_picks(
            *(
                numbers(picks_BGK, torch.int32, B * G * K, _LISTS),
                numbers(num_BG, torch.int32, B * G, _NUMBERS),
                B,
                G,
                K,
            ),
            *(_of_rows(each, B) for each in (records_B, num_slots_B, latest_B, num_tokens_B)),
            *(is_fresh, *sizes, places_BGK.data_ptr(), missing_BGK2.data_ptr()),
            *(num_missing_BG.data_ptr(), get_num_threads()),
        )
        return places_BGK, missing_BGK2, num_missing_BG

    def copy_heads(self, from_B: Tensor, to_B: Tensor, pairs_BGK2: Tensor, num_BG: Tensor, head_bytes: int) -> None:
        """Copy K and V of keys to their destinations, given as pairs (key, place) for each kv head. Runs on the calling
        thread only."""
        B, G, K, _ = pairs_BGK2.shape
        pairs = numbers(pairs_BGK2, torch.int32, B * G * K * 2, "pairs must be [B, G, K, 2] int32, contiguous")
        num = numbers(num_BG, torch.int32, B * G, _NUMBERS)
        self._copy_heads(_of_rows(from_B, B), _of_rows(to_B, B), pairs, num, B, G, K, head_bytes)

    def copy_rows(self, from_B: Tensor, to_B: Tensor, num_bytes: int) -> None:
        """Copy `num_bytes` bytes of each row. Runs on the calling thread only."""
        B = from_B.numel()
        self._copy_rows(_of_rows(from_B, B), _of_rows(to_B, B), B, num_bytes)

    def select_keys(
        self,
        q_BNR: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, int],
        num_kv_heads: int,
        limits: tuple[float, float, int, int, int],
        *,
        closeness_BGS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys that each kv head of a row selects, `[B, G, K]`, and their number, `[B, G]`. Writes every
        key's closeness to `closeness_BGS` (sparse/key_selection.cpp).

        `rows`: addresses, lengths, numbers of tokens, and number of new tokens of a row that have no partial key yet;
        their keys are always selected. `limits`: alpha, most share, free keys, and the numbers of
        first and last keys that are always selected."""
        has_dtype = q_BNR.dtype is torch.float32 and q_BNR.dim() == 3 and q_BNR.is_cpu
        require(has_dtype and q_BNR.is_contiguous(), "partial queries must be [B, N, R], in float32, contiguous")
        (B, N, R), G = q_BNR.shape, num_kv_heads
        each = "there must be an address, a length and a number of tokens for each row, in int64"
        of_rows = [numbers(tensor, torch.int64, B, each) for tensor in rows[:3]]
        S = -1 if closeness_BGS is None else closeness_BGS.shape[2]
        closeness = optional(closeness_BGS, torch.float32, B * G * S, "closeness is [B, G, S], float32")
        room = ctypes.c_int64()
        problem = (
            *(q_BNR.data_ptr(), *of_rows, B, N, G, R, rows[3], *limits),
            *(closeness, S),
        )
        self._select_keys(*problem, None, None, ctypes.addressof(room), 1)
        keys_BGK = torch.empty((B, G, room.value), dtype=torch.int32)
        num_BG = torch.empty((B, G), dtype=torch.int32)
        lists = keys_BGK.data_ptr(), num_BG.data_ptr(), ctypes.addressof(room)
        self._select_keys(*problem, *lists, get_num_threads())
        return keys_BGK, num_BG

    def project_keys(
        self, k_TGH: Tensor, basis_GHR: Tensor, columns_GR: Tensor | None, addresses: Tensor, numbers_: Tensor
    ) -> None:
        """Store the partial keys of tokens at the given addresses and numbers: one of each for every token, or only
        for the first token of a run (sparse/partial_keys.cpp). Runs on the calling thread only."""
        require(
            k_TGH.dim() == 3 and k_TGH.stride(2) == 1 and k_TGH.is_cpu, "keys must be [T, G, H], a head's in one piece"
        )
        require(k_TGH.dtype in FLOATS, "keys must be in bfloat16 or float32")
        T, G, H = k_TGH.shape
        has_dtype = basis_GHR.dtype is torch.float32 and basis_GHR.dim() == 3 and basis_GHR.stride(2) == 1
        fits = has_dtype and basis_GHR.shape[:2] == (G, H)
        require(fits, "a basis must be [G, H, R], in float32, a row in one piece")
        R, is_run = basis_GHR.shape[2], addresses.numel() == 1
        has_shape = columns_GR is None or columns_GR.shape == (G, R)
        a_column = "there must be a column for each of the basis', in int64"
        require(has_shape, a_column)
        each = "there must be an address and a number for each token, or for the first, in int64"
        places = [numbers(tensor, torch.int64, 1 if is_run else T, each) for tensor in (addresses, numbers_)]
        strides = (ctypes.c_int64 * 4)(*k_TGH.stride()[:2], *basis_GHR.stride()[:2])
        self._project_keys(
            *(k_TGH.data_ptr(), ctypes.addressof(strides), T, G, H, R, basis_GHR.data_ptr()),
            *(optional(columns_GR, torch.int64, G * R, a_column), *places, is_run, k_TGH.dtype is torch.bfloat16),
        )

    def note_picks(
        self,
        keys_BGK: Tensor,
        num_BG: Tensor,
        closeness_BGS: Tensor,
        rows: tuple[Tensor, Tensor],
        limits: tuple[int, int, int, int, int],
    ) -> Tensor:
        """Record a layer's selected keys in the rows' pools. Return the place of a victim for each list of rows that
        are full, `[B, G]`. Entries of other rows are meaningless (sparse/pool_notes.cpp).

        `rows`: addresses and positions. `limits`: number of places, first and end of the places that may be evicted,
        bits of a position, and the largest count.
        """
        (B, G, K), S = keys_BGK.shape, closeness_BGS.shape[2]
        lists = "picks must be int32, contiguous"
        keys, num = numbers(keys_BGK, torch.int32, B * G * K, lists), numbers(num_BG, torch.int32, B * G, lists)
        of_places = "closeness must be float32, contiguous, of every place"
        require(limits[0] <= S, of_places)
        closeness = numbers(closeness_BGS, torch.float32, B * G * S, of_places)
        each = "there must be an address and a position for each row, in int64"
        of_rows = [numbers(tensor, torch.int64, B, each) for tensor in rows]
        victims_BG = torch.zeros((B, G), dtype=torch.int64)
        self._note_picks(
            *(keys, num, B, G, K, closeness, S, *of_rows, *limits, victims_BG.data_ptr(), get_num_threads()),
        )
        return victims_BG

    def pack_kv(self, from_B: Tensor, to_B: Tensor, heads_B: Tensor, sizes: tuple[int, int, bool]) -> None:
        """Pack each row's heads in 4 bits (sparse/kv_int4.cpp). Runs on the calling thread only.

        `sizes`: head dim, channels of a group, and True if unpacked heads are bf16, False if they are fp32."""
        self._pack_kv(*_packed_rows(from_B, to_B, heads_B), heads_B.numel(), *sizes)

    def unpack_kv(self, from_B: Tensor, to_B: Tensor, heads_B: Tensor, sizes: tuple[int, int, bool]) -> None:
        """Unpack each row's heads. `sizes`: see `pack_kv`."""
        self._unpack_kv(*_packed_rows(from_B, to_B, heads_B), heads_B.numel(), *sizes, get_num_threads())

    def unpack_picked_kv(
        self,
        from_B: Tensor,
        to_B: Tensor,
        num_tokens_B: Tensor,
        picks: tuple[Tensor, Tensor],
        sizes: tuple[int, int, bool],
    ) -> int:
        """Unpack K and V of the packed tokens that each kv head selects, to these tokens' places. Return the number of
        selected keys that were unpacked. `picks`: keys and their numbers. `sizes`: see `pack_kv`."""
        B, unpacked, (picks_BGK, num_BG) = num_tokens_B.numel(), ctypes.c_int64(), picks
        require(picks_BGK.dim() == 3 and len(picks_BGK) == B, "picks must be [B, G, K]")
        _, G, K = picks_BGK.shape
        require(num_BG.shape == (B, G), "numbers of picks must be [B, G]")
        self._unpack_picked_kv(
            *(*_packed_rows(from_B, to_B, num_tokens_B), numbers(picks_BGK, torch.int32, B * G * K, _LISTS)),
            *(numbers(num_BG, torch.int32, B * G, _NUMBERS), B, G, K, *sizes),
            *(ctypes.addressof(unpacked), get_num_threads()),
        )
        return unpacked.value


def _of_rows(numbers_B: Tensor, num_rows: int) -> int:
    return numbers(numbers_B, torch.int64, num_rows, "rows have int64 numbers, contiguous")


def _packed_rows(from_B: Tensor, to_B: Tensor, numbers_B: Tensor) -> tuple[int, int, int]:
    B, text = numbers_B.numel(), "rows are two addresses and a number each"
    source, target = numbers(from_B, torch.int64, B, text), numbers(to_B, torch.int64, B, text)
    return source, target, numbers(numbers_B, torch.int64, B, text)
