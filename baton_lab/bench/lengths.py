"""Distributions of the numbers of prompt and output tokens of a load. Does no I/O."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

_NORMAL_P90 = 1.2815515655446004
"""Distance between the median and the 90th percentile of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Spread:
    """Lognormal distribution of a number of tokens. Every value is at least 1. With `sigma` 0, every value equals the
    median."""

    median: float
    sigma: float = 0.0
    """Standard deviation of the natural logarithm of the number of tokens."""

    @classmethod
    def fitted(cls, median: float, p90: float) -> "Spread":
        """Return the lognormal distribution with the given median and 90th percentile, in tokens."""
        return cls(median, math.log(p90 / median) / _NORMAL_P90)

    def draw(self, generator: np.random.Generator) -> int:
        """Draw one random number of tokens from the distribution."""
        return max(1, round(self.median * math.exp(self.sigma * generator.standard_normal())))


@dataclass(frozen=True)
class Mix:
    """Distributions of prompt and output lengths for one kind of workload."""

    prompt: Spread
    output: Spread

    def around(self, prompt: int | None, output: int | None) -> "Mix":
        """Return a copy of the mix with other median lengths in tokens and the same sigmas. None keeps the mix's
        median."""
        return Mix(
            self.prompt if prompt is None else replace(self.prompt, median=prompt),
            self.output if output is None else replace(self.output, median=output),
        )


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "fixed": Mix(Spread(256), Spread(64)),
        # Medians and 90th percentiles of openchat_sharegpt4 and arxiv_summarization in Agrawal et al., "Taming
        # Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024), table 2.
        "sharegpt": Mix(Spread.fitted(1730, 5696), Spread.fitted(415, 834)),
        "long": Mix(Spread.fitted(7059, 12985), Spread.fitted(208, 371)),
    }
)
"""Predefined length mixes by the name that `--lengths` accepts."""
