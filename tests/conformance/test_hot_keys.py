"""Places of picks on a device: each where its record says, none twice, and what is missing is what was not there."""

import random

import pytest
import torch

from baton.modeling.kernels import native

pytestmark = pytest.mark.skipif(not native.load(), reason="needs a C++ compiler")
NUM_LATEST, MOST_SLOTS, NUM_HEADS = 4, 12, 2
HEAD = 3


class Simple:
    """Sets and dictionaries in place of records."""

    def __init__(self, num_rows: int) -> None:
        self.slot_of: list[dict[int, int]] = [{} for _ in range(num_rows * NUM_HEADS)]
        """Slot of each key that is there, by list."""

    def check(
        self,
        index: int,
        placed: dict[int, int],
        missing: list[tuple[int, int]],
        *,
        latest: int,
        own: int,
        num_slots: int,
        fresh: bool,
    ) -> None:
        """`placed`: the place of each pick, in their order."""
        picks = [*placed]
        slot_of = self.slot_of[index]
        if fresh:
            slot_of.clear()
        early = [key for key in picks if key < latest]
        expected = [key for key in early if key not in slot_of]
        late = [key for key in picks if latest <= key != own] if fresh else []
        assert [key for key, _ in missing] == expected + late
        for key, place in placed.items():
            if key >= latest:
                assert place == key - latest
                continue
            slot = place - NUM_LATEST
            assert 0 <= slot < num_slots
            assert slot_of.get(key, slot) == slot, "a key that was there has moved"
            for other, taken in list(slot_of.items()):
                if taken == slot and other != key:
                    assert other not in picks, "a picked key was evicted"
                    del slot_of[other]
            slot_of[key] = slot
        assert dict(missing) == {key: placed[key] for key, _ in missing}
        assert len({*slot_of.values()}) == len(slot_of)


@pytest.mark.parametrize("seed", range(20))
def test_random_picks_beside_sets(seed: int) -> None:
    rng, num_rows = random.Random(seed), 3
    records = torch.zeros(num_rows, NUM_HEADS * (HEAD + 2 * MOST_SLOTS), dtype=torch.int32)
    simple = Simple(num_rows)
    addresses_B = torch.tensor([record.data_ptr() for record in records])
    num_tokens, starts = [rng.randint(1, 20) for _ in range(num_rows)], [0] * num_rows
    for step in range(40):
        fresh = [step == 0 or rng.random() < 0.1 for _ in range(num_rows)]
        num_slots = [min(MOST_SLOTS, 4 + step) for _ in range(num_rows)]
        starts = [max(was, num - rng.randint(1, NUM_LATEST)) for was, num in zip(starts, num_tokens, strict=True)]
        lists = []
        for row in range(num_rows):
            for _ in range(NUM_HEADS):
                early, late = range(starts[row]), range(starts[row], num_tokens[row])
                chosen = rng.sample(early, rng.randint(0, min(len(early), num_slots[row])))
                lists.append(sorted({*chosen, *rng.sample(late, rng.randint(0, len(late))), num_tokens[row] - 1}))
        width = max(map(len, lists))
        picks_BGK = torch.full((num_rows, NUM_HEADS, width), -7, dtype=torch.int32)
        for index, keys in enumerate(lists):
            picks_BGK.view(-1, width)[index, : len(keys)] = torch.tensor(keys)
        num_BG = torch.tensor([len(keys) for keys in lists], dtype=torch.int32).view(num_rows, NUM_HEADS)
        numbers = torch.tensor(num_slots), torch.tensor(starts), torch.tensor(num_tokens), torch.tensor(fresh)
        places_BGK, missing_BGK2, num_missing_BG = native.operators().admit_picks(
            picks_BGK, num_BG, addresses_B, numbers, (NUM_LATEST, MOST_SLOTS)
        )
        for index, keys in enumerate(lists):
            row, places = index // NUM_HEADS, places_BGK.view(-1, width)[index].tolist()[: len(keys)]
            pairs = missing_BGK2.view(-1, width, 2)[index].tolist()[: int(num_missing_BG.view(-1)[index])]
            missing = [(key, place) for key, place in pairs]
            simple.check(
                index,
                dict(zip(keys, places, strict=True)),
                missing,
                latest=starts[row],
                own=num_tokens[row] - 1,
                num_slots=num_slots[row],
                fresh=fresh[row],
            )
        num_tokens = [num + 1 for num in num_tokens]


def test_more_picks_than_slots_are_refused() -> None:
    records = torch.zeros(1, HEAD + 2 * MOST_SLOTS, dtype=torch.int32)
    picks_BGK, num_BG = torch.arange(6, dtype=torch.int32).view(1, 1, 6), torch.tensor([[6]], dtype=torch.int32)
    addresses_B, is_fresh_B = torch.tensor([records.data_ptr()]), torch.tensor([True])
    numbers = torch.tensor([5]), torch.tensor([6]), torch.tensor([7]), is_fresh_B
    with pytest.raises(RuntimeError, match="6 keys are picked, and there are 5 slots"):
        native.operators().admit_picks(picks_BGK, num_BG, addresses_B, numbers, (NUM_LATEST, MOST_SLOTS))


def test_heads_are_copied_to_their_places_and_nothing_else() -> None:
    home_SKGH, there_SKGH = torch.randn(9, 2, NUM_HEADS, 8), torch.full((5, 2, NUM_HEADS, 8), torch.nan)
    pairs_BGK2 = torch.tensor([[[[7, 0], [2, 3]], [[8, 4], [0, 0]]]], dtype=torch.int32)
    num_BG = torch.tensor([[2, 1]], dtype=torch.int32)
    addresses = torch.tensor([home_SKGH.data_ptr()]), torch.tensor([there_SKGH.data_ptr()])
    native.operators().copy_heads(*addresses, pairs_BGK2, num_BG, 8 * 4)
    expected = torch.full((5, 2, NUM_HEADS, 8), torch.nan)
    for head, key, place in ((0, 7, 0), (0, 2, 3), (1, 8, 4)):
        expected[place, :, head] = home_SKGH[key, :, head]
    torch.testing.assert_close(there_SKGH, expected, rtol=0, atol=0, equal_nan=True)
