"""A claimed term is higher than all terms that were claimed or reported before, also if several supervisors claim
terms."""

from deploy.groups.terms import OwnTermStore, Terms


class Store(OwnTermStore):
    """Store in which another supervisor has claimed terms after `highest` was read."""

    def __init__(self, num_claimed: int) -> None:
        super().__init__()
        self.num_claimed = num_claimed

    def create(self, term: int) -> bool:
        self.num_claimed -= 1
        return super().create(term) and self.num_claimed < 0


def test_terms_grow() -> None:
    terms = Terms()
    assert [terms.claim() for _ in range(3)] == [1, 2, 3]


def test_a_term_is_higher_than_those_that_workers_have_seen() -> None:
    terms = Terms()
    terms.hear(41)
    terms.hear(7)
    assert [terms.claim(), terms.claim()] == [42, 43]


def test_a_term_that_another_supervisor_has_claimed_meanwhile_is_not_used() -> None:
    assert Terms(Store(num_claimed=2)).claim() == 3


def test_supervisors_with_one_store_claim_different_terms() -> None:
    store = OwnTermStore()
    first, second = Terms(store), Terms(store)
    second.hear(5)
    assert [each.claim() for each in (first, second, first, second)] == [1, 6, 7, 8]
