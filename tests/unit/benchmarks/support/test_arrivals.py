"""A burst is two long prompts at once and ten short ones after them, the same for the same seed."""

from benchmarks.support.arrivals import LONG_TOKENS, SHORT_TOKENS, burst


def test_long_prompts_come_first_and_short_ones_while_they_are_served() -> None:
    arrivals = burst(seed=3)
    assert [each.num_tokens for each in arrivals] == [LONG_TOKENS] * 2 + [SHORT_TOKENS] * 10
    assert [each.at_s for each in arrivals[:2]] == [0.0, 0.0]
    assert list(arrivals) == sorted(arrivals)
    assert 0.2 <= arrivals[2].at_s <= arrivals[-1].at_s <= 2.0


def test_equal_seeds_make_equal_bursts_and_no_prompt_comes_twice() -> None:
    assert burst(seed=1) == burst(seed=1) != burst(seed=2)
    prompts = [(each.num_tokens, each.seed) for seed in range(3) for each in burst(seed)]
    assert len(set(prompts)) == len(prompts)
