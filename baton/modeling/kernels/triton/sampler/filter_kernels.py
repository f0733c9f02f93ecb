"""Triton kernel that counts keys of tokens, and functions that find the last token that filters keep. Imports Triton.

A filter keeps a prefix of the tokens in the order of their keys (`logit_tiles`), and of their ids if keys are equal.
Radix selection finds the last kept token without a sort: three histograms divide the keys by their digits of 11, 10 and
10 bits, and each histogram counts only the keys with the digits that the former ones selected. Top-k needs the number
of tokens of each bin, and top-p their *mass* (the sum of exp(-key)).

Counts and masses are integers, so they do not depend on the order of the programs that add them. The mass of a token
is stored in units of exp(-first key of its bin) / 2^43. Bins of the third histogram have one key each, whose mass is
computed from the count. The relative error of the mass of a bin is below 2^-38, and below 2^-42 for keys up to 16. For
comparison, a float64 sum over 2^17 tokens may have a relative error of 2^-36.

Shape letters: B sequences, V vocabulary size, X tokens of a tile, D bins of a histogram, P parts of a row of logits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.modeling.kernels.triton.sampler.logit_tiles import (
    DrawnRows,
    PartResults,
    largest_logit,
    load_tile,
    part_of,
    scale,
)

NUM_BINS = tl.constexpr(6144)
"""Number of bins of the five histograms of a row."""
MOST_SCALED = tl.constexpr(64.0)
"""Largest abs((logit - largest logit) / temperature) of a token that may be drawn. Noise is between -3.7 and 36.8, so
the best score is above -3.7, and less likely tokens cannot have it. The mass of all less likely tokens is below the
rounding of the total in float64."""
MASS_UNIT = tl.constexpr(2.0**-43)
"""Unit of masses in a histogram. The mass of 2^19 tokens is at most 2^62."""
ALL_EQUAL = tl.constexpr(1 << 30)
"""Number of tokens with the last kept key that stands for all of them."""


class Searches(NamedTuple):
    """Kernel argument: addresses of the histograms `[B, 2, NUM_BINS]` of counts and masses, int64, initially 0, and of
    the states `[B, 5, 3]` of the searches for the last kept tokens, float64 (`load_state`). None without filters."""

    histograms: Any
    states: Any


@triton.jit
def number_of(key: tl.tensor) -> tl.tensor:
    """Return the fp32 number whose bits are the key, in float64."""
    return key.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def mass_of(key: tl.tensor) -> tl.tensor:
    """Return exp(-key) in float64, where the key stands for the fp32 number with its bits."""
    return tl.exp(-number_of(key))


@triton.jit
def load_bins(
    searches: Searches, row: tl.tensor, low: tl.tensor, digit: tl.constexpr, by_mass: tl.constexpr
) -> tl.tensor:
    """Return the weights of the bins of a histogram: the number of tokens, or their mass, in float64. `low` is the
    first key of the first bin."""
    bin_D = tl.arange(0, digit.num_bins)
    histogram = searches.histograms + row * (2 * NUM_BINS) + digit.first_bin
    has_masses: tl.constexpr = by_mass and digit.shift > 0
    if has_masses:
        weight_D = tl.load(histogram + NUM_BINS + bin_D).to(tl.float64) * MASS_UNIT
    else:
        weight_D = tl.load(histogram + bin_D).to(tl.float64)
    if by_mass:
        weight_D *= mass_of(tl.where(weight_D > 0, low + (bin_D << digit.shift), 0))
    return weight_D


@triton.jit
def last_bin(weight_D: tl.tensor, search: tl.tuple, num_bins: tl.constexpr) -> tl.tuple:
    """Return the last bin that is not empty, and whose predecessors have less than the target weight of a search. Also
    return the weight before the bin, and its own weight. `search`: first key of the histogram, weight of all smaller
    keys, and target. If no bin has this property, the first bin is returned."""
    _, before, target = search
    bin_D = tl.arange(0, num_bins)
    before_D = before + (tl.cumsum(weight_D, 0) - weight_D)
    found = tl.max(tl.where((weight_D > 0) & (before_D < target), bin_D, 0), 0)
    is_found_D = bin_D == found
    return found, tl.sum(tl.where(is_found_D, before_D, 0.0), 0), tl.sum(tl.where(is_found_D, weight_D, 0.0), 0)


@triton.jit
def narrow(
    searches: Searches, row: tl.tensor, search: tl.tuple, digit: tl.constexpr, by_mass: tl.constexpr
) -> tl.tuple:
    """Return the search for the last kept key in the bin of a histogram that contains it."""
    weight_D = load_bins(searches, row, search[0], digit, by_mass)
    found, before, _ = last_bin(weight_D, search, digit.num_bins)
    return search[0] + (found << digit.shift), before, search[2]


@triton.jit
def cut(searches: Searches, row: tl.tensor, search: tl.tuple, digit: tl.constexpr, by_mass: tl.constexpr) -> tl.tuple:
    """Return the last kept key from a histogram of single keys, and the number of kept tokens with this key, which is
    ALL_EQUAL if all of them are kept."""
    weight_D = load_bins(searches, row, search[0], digit, by_mass)
    found, before, weight = last_bin(weight_D, search, digit.num_bins)
    unit = tl.full((), 1.0, tl.float64)
    if by_mass:
        unit = mass_of(search[0] + found)
    num_kept = tl.maximum(tl.ceil((search[2] - before) / unit), 1.0)
    num_kept = tl.where(num_kept * unit >= weight, ALL_EQUAL, tl.minimum(num_kept, ALL_EQUAL)).to(tl.int32)
    return search[0] + found, num_kept


@triton.jit
def load_state(searches: Searches, row: tl.tensor, digit: tl.constexpr) -> tl.tuple:
    """Return the search whose keys a histogram counts: the first key, the weight of all smaller keys, and the
    target."""
    state = searches.states + (row * 5 + digit.index) * 3
    return tl.load(state).to(tl.int32), tl.load(state + 1), tl.load(state + 2)


@triton.jit
def store_state(searches: Searches, row: tl.tensor, digit: tl.constexpr, search: tl.tuple) -> None:
    """Store the search whose keys a histogram counts."""
    state = searches.states + (row * 5 + digit.index) * 3
    tl.store(state, search[0].to(tl.float64))
    tl.store(state + 1, search[1])
    tl.store(state + 2, search[2])


@triton.jit
def whole_search(target: tl.tensor) -> tl.tuple:
    """Return the search for the last kept key among all keys."""
    return tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64), target


@triton.jit
def sum_before(searches: Searches, row: tl.tensor, key: tl.tensor, digit: tl.constexpr) -> tl.tensor:
    """Return the mass of the bins of a histogram before the bin that contains a key."""
    low = (key >> digit.shift) // digit.num_bins * digit.num_bins << digit.shift
    weight_D = load_bins(searches, row, low, digit, True)
    return tl.sum(tl.where(tl.arange(0, digit.num_bins) < (key - low) >> digit.shift, weight_D, 0.0), 0)


@triton.jit
def kept_mass(searches: Searches, row: tl.tensor, top_k: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the mass of the tokens that min-p and top-k keep."""
    total = tl.sum(load_bins(searches, row, tl.full((), 0, tl.int32), shape.first, True), 0)
    if top_k < shape.vocab_size:
        search = load_state(searches, row, shape.top_k_third)
        key, num_equal = cut(searches, row, search, shape.top_k_third, False)
        count_D = load_bins(searches, row, search[0], shape.top_k_third, False)
        count = tl.sum(tl.where(tl.arange(0, shape.top_k_third.num_bins) == key - search[0], count_D, 0.0), 0)
        total = sum_before(searches, row, key, shape.first) + sum_before(searches, row, key, shape.top_k_second)
        total += sum_before(searches, row, key, shape.top_k_third)
        total += tl.minimum(count, num_equal.to(tl.float64)) * mass_of(key)
    return total


@triton.jit
def begin_search(
    rows: DrawnRows, searches: Searches, row: tl.tensor, digit: tl.constexpr, shape: tl.constexpr
) -> tl.tuple:
    """Return the search whose keys a histogram counts, from the former histograms."""
    if digit.index == 0:
        search = whole_search(tl.full((), 0.0, tl.float64))
    elif digit.index == 1:
        search = whole_search(tl.load(rows.top_k + row).to(tl.float64))
        search = narrow(searches, row, search, shape.first, False)
    elif digit.index == 2:
        search = narrow(searches, row, load_state(searches, row, shape.top_k_second), shape.top_k_second, False)
    elif digit.index == 3:
        total = kept_mass(searches, row, tl.load(rows.top_k + row), shape)
        search = narrow(searches, row, whole_search(tl.load(rows.top_p + row) * total), shape.first, True)
    else:
        search = narrow(searches, row, load_state(searches, row, shape.top_p_second), shape.top_p_second, True)
    return search


@triton.jit
def most_key(rows: DrawnRows, row: tl.tensor) -> tl.tensor:
    """Return the largest key that min-p keeps. It is at most the key of MOST_SCALED."""
    most = tl.minimum(tl.abs(tl.load(rows.floor + row)), MOST_SCALED)
    rounded = most.to(tl.float32)
    key = rounded.to(tl.int32, bitcast=True)
    return tl.where(rounded.to(tl.float64) > most, key - 1, key)


@triton.jit
def last_kept(
    rows: DrawnRows, searches: Searches, row: tl.tensor, filters: tl.constexpr, shape: tl.constexpr
) -> tl.tuple:
    """Return the last key that the filters of a row keep, and the number of kept tokens with this key, which is
    ALL_EQUAL if all of them are kept. `filters`: True if top-k and top-p may be set."""
    key, num_equal = most_key(rows, row), tl.full((), ALL_EQUAL, tl.int32)
    if filters:
        if tl.load(rows.top_k + row) < shape.vocab_size:
            search = load_state(searches, row, shape.top_k_third)
            key, num_equal = cut(searches, row, search, shape.top_k_third, False)
        if tl.load(rows.top_p + row) < 1.0:
            search = load_state(searches, row, shape.top_p_third)
            top_p_key, num_top_p = cut(searches, row, search, shape.top_p_third, True)
            is_less = (top_p_key < key) | ((top_p_key == key) & (num_top_p < num_equal))
            key, num_equal = tl.where(is_less, top_p_key, key), tl.where(is_less, num_top_p, num_equal)
    return key, num_equal


@triton.jit
def count_keys(
    rows: DrawnRows, parts: PartResults, searches: Searches, digit: tl.constexpr, shape: tl.constexpr
) -> None:
    """Kernel that adds the tokens of one part of a row to a histogram. Grid: (B, P)."""
    row, begin, end = part_of(shape)
    temperature, top_p = tl.load(rows.temperature + row), tl.load(rows.top_p + row)
    largest = largest_logit(parts, row, tl.num_programs(1), shape)
    has_top_k, has_top_p = tl.load(rows.top_k + row) < shape.vocab_size, top_p < 1.0
    is_needed = has_top_p if digit.by_mass else (has_top_k | has_top_p if digit.index == 0 else has_top_k)
    if (temperature == 0) | (tl.abs(largest) == float("inf")) | (is_needed == 0):
        return
    search = begin_search(rows, searches, row, digit, shape)
    if tl.program_id(1) == 0:
        store_state(searches, row, digit, search)
    low = search[0]
    last = tl.minimum(most_key(rows, row), low + ((digit.num_bins << digit.shift) - 1))
    histogram = searches.histograms + row * (2 * NUM_BINS) + digit.first_bin
    count_D = tl.full([digit.num_bins], 0, tl.int32)
    for start in range(begin, end, shape.tile_tokens):
        _, logit_X = load_tile(rows, row, start, shape)
        _, key_X = scale(logit_X, largest, temperature)
        is_here_X = (key_X >= low) & (key_X <= last)
        bin_X = tl.where(is_here_X, (key_X - low) >> digit.shift, 0)
        count_D += tl.histogram(bin_X, digit.num_bins, mask=is_here_X)
        if digit.shift > 0 and has_top_p:
            first_X = low + (bin_X << digit.shift)
            mass_X = tl.exp(number_of(first_X) - number_of(tl.where(is_here_X, key_X, first_X)))
            mass_X = (mass_X / MASS_UNIT + 0.5).to(tl.int64)
            tl.atomic_add(histogram + NUM_BINS + bin_X, mass_X, mask=is_here_X, sem="relaxed")
    bin_D = tl.arange(0, digit.num_bins)
    tl.atomic_add(histogram + bin_D, count_D.to(tl.int64), mask=count_D > 0, sem="relaxed")
