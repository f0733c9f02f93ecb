"""C++ kernels for residency policies that store or read only a part of the KV. Each kernel is called as an operation on
tensors. A residency policy decides where and how the KV of sequences is stored.

`operators` has all other kernels. The memory of each row (sequence) is passed as an address, int64 on the CPU.

Shape letters: B rows, T tokens, N heads, G kv heads, H head dim, R columns of partial keys, at most K selected keys, S
keys.
"""

import ctypes

import torch
from torch import Tensor, get_num_threads

from baton.modeling.kernels.calls.checks import FLOATS, numbers, optional, require
from baton.modeling.kernels.calls.library import Library

_LISTS = "picks must be [B, G, K] int32, contiguous"
_NUMBERS = "numbers of picks must be [B, G] int32, contiguous"


class SparseOperators:
    """C++ kernels for residency policies that store or read only a part of the KV, built for one instruction set. Their
    sources are in the folder `sparse`."""

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
        """Find each selected key in its sequence's cache on the device, and assign a cache slot to each key that is
        missing (sparse/hot_keys.cpp). A cache has numbered places, each for one key of each kv head. The first places
        hold the keys of the latest tokens. The remaining places are called slots and hold other keys.

        Return the place of each selected key, `[B, G, K]`, the missing keys as pairs of key and place, `[B, G, K, 2]`,
        and the number of missing keys, `[B, G]`.

        `records_B`: address of each sequence's records, which list the keys in its slots. `sizes`: number of places for
        latest tokens, and maximum number of slots. `rows`: four tensors with one entry for each sequence:

        - the number of slots,
        - the index of a token: this token and all later tokens are the latest tokens,
        - the number of tokens,
        - True if the cache contains no key except that of the new token.
        """
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
        """Copy single keys together with their values. `from_B`, `to_B`: source and target address of each sequence's
        KV. `pairs_BGK2`: for each kv head, pairs of a key's index at the source and its index at the target. `num_BG`:
        number of pairs of each kv head. `head_bytes`: bytes of one key of a head. Runs on the calling thread only."""
        B, G, K, _ = pairs_BGK2.shape
        pairs = numbers(pairs_BGK2, torch.int32, B * G * K * 2, "pairs must be [B, G, K, 2] int32, contiguous")
        num = numbers(num_BG, torch.int32, B * G, _NUMBERS)
        self._copy_heads(_of_rows(from_B, B), _of_rows(to_B, B), pairs, num, B, G, K, head_bytes)

    def copy_rows(self, from_B: Tensor, to_B: Tensor, num_bytes: int) -> None:
        """Copy `num_bytes` bytes for each sequence, from its address in `from_B` to its address in `to_B`. Runs on the
        calling thread only."""
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
        """Select keys for each sequence and kv head (sparse/key_selection.cpp). Return the selected keys, `[B, G, K]`,
        and their number, `[B, G]`. If `closeness_BGS` is given, the closeness of every key is written to it
        (`baton.modeling.forward.selection` defines closeness as S_g).

        `rows`: addresses of partial keys, numbers of keys, numbers of tokens, and, as one number for all sequences, how
        many new tokens of a sequence have no partial keys yet. The keys of these tokens are always selected. `limits`:
        the fields alpha, most_share, free_keys, num_first and num_last of `Selection`.
        """
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
        """Compute the partial keys (keys reduced to fewer columns) of tokens and store them (sparse/partial_keys.cpp).
        Runs on the calling thread only.

        `basis_GHR`: matrix of each kv head by which its keys are multiplied. `columns_GR`: columns of a key that make
        up its partial key. None if the matrices do more than select columns. `addresses`: address of the partial keys
        of each token's sequence. `numbers_`: index of each token in its sequence. If `addresses` and `numbers_` have
        only one element each, they describe the first token, and all tokens are consecutive tokens of one sequence.
        """
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
        """Record a layer's selected keys in the sequences' pools, and choose victims: the tokens to evict next
        (sparse/pool_notes.cpp). Each kv head of a sequence has a pool with a limited number of places, each for the KV
        of one token. For each place, a record states how often its token was selected, or in which step it was last
        selected.

        Return the place of the victim for each sequence and kv head, `[B, G]`. If the pool of a sequence is not full,
        ignore the victim.

        `rows`: address of each sequence's records, and position of the sequence's new token. `limits` contains five
        numbers: the number of places, the start and the end of the range of places that may be evicted, the number of
        bits of a record that hold the token's position, and the largest value of a selection counter. If this largest
        value is 0, records have no counters. A record then identifies the latest step that selected the token, by the
        position of the sequence's new token in this step.
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
        """Quantise heads (K or V vectors of one kv head) to 4 bits (sparse/kv_int4.cpp). Runs on the calling thread
        only.

        `from_B`, `to_B`, `heads_B`: source address, target address and number of heads of each sequence. `sizes`: head
        dim, channels of a quantisation group, and True if unpacked heads are bf16, False if they are fp32.
        """
        self._pack_kv(*_packed_rows(from_B, to_B, heads_B), heads_B.numel(), *sizes)

    def unpack_kv(self, from_B: Tensor, to_B: Tensor, heads_B: Tensor, sizes: tuple[int, int, bool]) -> None:
        """Unpack heads (K or V vectors of one kv head) that `pack_kv` has quantised to 4 bits. `from_B`, `to_B`,
        `heads_B`: source address, target address and number of heads of each sequence. `sizes`: head dim, channels of a
        quantisation group, and True if unpacked heads are bf16, False if they are fp32."""
        self._unpack_kv(*_packed_rows(from_B, to_B, heads_B), heads_B.numel(), *sizes, get_num_threads())

    def unpack_picked_kv(
        self,
        from_B: Tensor,
        to_B: Tensor,
        num_tokens_B: Tensor,
        picks: tuple[Tensor, Tensor],
        sizes: tuple[int, int, bool],
    ) -> int:
        """Unpack K and V, which are stored in 4 bits, of the tokens that each kv head has selected. Each token is
        written to its own position in the unpacked memory. Return the number of keys that were unpacked.

        `from_B`, `to_B`: addresses of each sequence's packed and unpacked KV. `picks`: selected keys `[B, G, K]` and
        their number `[B, G]`. `sizes`: head dim, channels of a quantisation group, and True if unpacked heads are bf16,
        False if they are fp32.
        """
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
