"""Fits costs of prefill and of links to measurements: of chains whose ranks all compute, of whole prompts on one rank,
such as those in a paper's table, and of single messages. Does no I/O."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError
from baton.planning.chain.wavefront import rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol
from baton.planning.fit import fit_relative

Points = Sequence[tuple[float, float]]
"""Measurements, as (quantity, seconds)."""


@dataclass(frozen=True)
class RankRow:
    """Measurement of one rank of a prefill chain: the time in which the rank computed a chunk of a prompt in all
    layers."""

    tokens: int
    """Number of tokens in the rank's chunk."""
    before: int
    """Number of keys before the chunk, from cached tokens and from earlier ranks."""
    is_last: bool
    """True for the last rank of a chain. Other ranks end as soon as their KV of the last layer can be sent."""
    seconds: float
    """Compute time of the rank in seconds, without waits."""


@dataclass(frozen=True)
class PrefillFit:
    """Fitted costs of prefill in seconds. A layer with C tokens and P pairs of a query and a key takes fixed_s +
    linear_s * C + pair_s * P seconds."""

    linear_s: float
    pair_s: float
    fixed_s: float
    residual: float
    """Largest relative deviation of a measurement from the fit."""


def fit_chain(origin: CostModel, rank_rows: Sequence[RankRow], link_points: Points, request_s: float) -> CostModel:
    """Fit costs to measurements of a prefill chain that serves requests.

    `origin` has the costs that are not measured. `request_s` is the time in seconds that a request spends outside the
    chain; it becomes `head_s`. If `link_points` is empty (a chain of one rank), the link of `origin` is kept. Raises
    InvalidArgumentError if there are too few rows, or if times do not increase with the number of tokens.
    """
    fit = fit_ranks(rank_rows, origin, BATON)
    if not fit.linear_s + fit.pair_s > 0:
        raise InvalidArgumentError("rank_rows: longer chunks took no longer: measure longer prompts")
    return dataclasses.replace(
        origin,
        linear_s=fit.linear_s,
        pair_s=fit.pair_s,
        fixed_s=fit.fixed_s,
        issue_s=0.0,
        head_s=request_s,
        link=measured_link(link_points, origin.link) if link_points else origin.link,
    )


def fit_prefill(points: Points, num_layers: int, kernel: Kernel) -> PrefillFit:
    """Fit prefill costs to measurements of whole prompts on one rank, as (tokens, seconds). Raises InvalidArgumentError
    if there are too few points."""
    tokens, seconds = check_points("points", "token counts", points)
    pairs = tokens**2 * kernel.own_part
    columns = num_layers * np.stack([tokens, pairs, np.ones_like(tokens)], axis=1)
    (linear_s, pair_s, fixed_s), residual = fit_relative(columns, seconds)
    return PrefillFit(linear_s, pair_s, fixed_s, residual)


def fit_ranks(rows: Sequence[RankRow], known: CostModel, protocol: Protocol) -> PrefillFit:
    """Fit prefill costs to `rows`, which were measured while all ranks of a chain computed. Only the fields
    `num_layers` and `project_share` of `known` are used. Raises InvalidArgumentError if there are too few rows."""
    check_points(
        "rank_rows", "chunks", [(row.tokens * row.tokens + row.tokens * row.before, row.seconds) for row in rows]
    )
    chunks = np.array([[row.tokens] for row in rows], dtype=np.float64)
    before = np.array([[row.before] for row in rows], dtype=np.float64)
    is_last = np.array([[row.is_last] for row in rows])

    def column(linear_s: float, pair_s: float, fixed_s: float) -> NDArray[np.float64]:
        """Return the predicted seconds of all rows with these costs."""
        cost = CostModel(known.num_layers, linear_s, pair_s, 0, known.project_share, fixed_s=fixed_s)
        return rank_seconds(work_of(chunks, cost, protocol, before), is_last, cost, protocol)[:, 0]

    linear = column(1.0, 0.0, 0.0)
    columns = np.stack([linear, column(0.0, 1.0, 0.0), column(1.0, 0.0, 1.0) - linear], axis=1)
    (linear_s, pair_s, fixed_s), residual = fit_relative(columns, np.array([row.seconds for row in rows]))
    return PrefillFit(linear_s, pair_s, fixed_s, residual)


def fit_link(points: Points) -> LinkModel:
    """Fit latency and bandwidth of a link to measurements, which are (bytes, seconds) of single messages. A message
    takes latency_s + bytes / bandwidth. Raises InvalidArgumentError if there are too few points, or if times do not
    increase with the number of bytes."""
    num_bytes, seconds = check_points("points", "sizes", points)
    (latency_s, byte_s), _ = fit_relative(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), seconds)
    if not byte_s > 0:
        raise InvalidArgumentError("points: larger messages took no longer: measure larger ones")
    return LinkModel(latency_s, 1 / byte_s)


def measured_link(points: Points, former: LinkModel) -> LinkModel:
    """Return the link model fitted to `points`, which are measured (bytes, seconds) of single messages. If larger
    messages did not take longer in the measurements, the result has the bandwidth of `former`, the previous link
    model."""
    try:
        return fit_link(points)
    except InvalidArgumentError:  # all sizes are equal, or larger ones took no longer: only the latency can be fitted
        beyond_s = [seconds - num_bytes / former.bandwidth for num_bytes, seconds in points]
        return LinkModel(max(statistics.median(beyond_s), 0.0), former.bandwidth)


def check_points(name: str, what: str, points: Points) -> tuple[NDArray[np.float64], ...]:
    """Return the points, which are pairs (quantity, seconds), as two arrays. `what` names the quantity in error
    messages, for example "tokens". `name` identifies the points in these messages. Raises InvalidArgumentError for
    fewer than two different quantities, or for values that are not positive and finite."""
    if len({x for x, _ in points}) < 2:
        raise InvalidArgumentError(f"{name}: {len(points)} given, with fewer than 2 different {what}: measure more")
    if not all(0 < each < math.inf for point in points for each in point):
        raise InvalidArgumentError(
            f"{name}: {what} and seconds must be above 0, and finite: leave out what was not measured"
        )
    return tuple(np.array(points, dtype=np.float64).T)
