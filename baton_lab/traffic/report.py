"""Result tables of `baton simulate-traffic`."""

from collections.abc import Mapping

from rich.table import Table

from baton_lab.traffic.results import Results, Targets
from baton_lab.traffic.traces.trace import Trace
from deploy.options.screen import number_table


def table(trace: Trace, runs: Mapping[str, Results], targets: Targets, hardware: str) -> Table:
    """Return a table with one line per policy: latencies in seconds, good requests, and cost. The title names the
    trace and the `hardware`."""
    title = (
        f"{trace.name} on {hardware}: {len(trace)} requests in {trace.duration_s:.0f} s; good: first token within "
        f"{targets.ttft_s:g} s, mean gap within {targets.itl_s * 1e3:g} ms"
    )
    headings = "policy|TTFT p50|p95|p99|ITL p50\nms|p95\nms|good\n%|goodput\n/s|group-s|good a\ngroup-s|changes"
    made = number_table(title, headings.split("|"), words="policy")
    for name, results in runs.items():
        numbers = results.summary(targets)
        ttft, itl = numbers["ttft_s"], numbers["itl_s"]
        made.add_row(
            name,
            *(_number(ttft[each], 3) for each in ("p50", "p95", "p99")),
            *(_number(itl[each], 1, 1e3) for each in ("p50", "p95")),
            f"{numbers['good_share']:.1%}".removesuffix("%"),
            f"{numbers['goodput_rps']:.2f}",
            f"{numbers['group_s']:.0f}",
            _number(numbers["good_per_group_s"], 3),
            str(len(results.scaler_events)),
        )
    return made


def decisions(name: str, results: Results) -> str:
    """Return the decisions of a scaling policy as text, one line per decision. `name`: name of the policy."""
    lines = [f"  {event.time_s:8.1f} s  {event.why}" for event in results.scaler_events]
    return "\n".join([f"{name}: {len(lines)} changes", *lines])


def _number(value: float | None, num_digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.{num_digits}f}"
