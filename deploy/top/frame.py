"""Makes one frame of `baton top`, which shows the state and the rates of a cluster. A frame needs at least 80 columns.
The functions have no side effects."""

from collections.abc import Iterator, Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState
from baton.v1.common_pb2 import PrefixStoreStatus
from deploy.commands.status import scaling_of
from deploy.top.rates import Rates
from deploy.top.sampling import Snapshot

_BAR = 6
"""Width of a bar, in terminal columns."""
_COLOURS = {"yes": "green", "draining": "yellow", "drained": "yellow", "broken": "red", "no": "red"}
_UNITS = ("B", "K", "M", "G", "T")


def frame(target: str, now: Snapshot, rates: Rates | None, clock: str) -> RenderableType:
    """Return a frame that shows the cluster. `target` is the cluster's address as text. `now` is the latest sample of
    its state. `rates` are None if there is no earlier sample. `clock` is the time of day as text."""
    state = now.state
    title = Text.assemble((f"baton {state.version}", "bold"), f" at {target}  {clock}  ", _health(state))
    parts: list[RenderableType] = [title]
    parts += [Text(line, style="yellow", overflow="fold") for line in (*state.why_not_serving, *state.why_degraded)]
    parts += [Text(line) for line in _traffic(now, rates)]
    if now.complaint:
        parts.append(Text(now.complaint, style="yellow", overflow="fold"))
    parts += [Text(line, overflow="fold", style="dim") for line in scaling_of(state)]
    for table in (generation_table(state, rates), prefill_table(state, rates), kv_table(state, rates)):
        if table.row_count:
            parts += [Text(), table]
    return Group(*parts)


def generation_table(state: ClusterState, rates: Rates | None) -> Table:
    """Return the table of generation groups, with the running requests, used slots, used KV memory and step times of
    each group."""
    table = _table("generation", "state", "work>", "slots", ">", "KV", ">", "step\nms>", "steps\n/s>", "drafts\nkept>")
    for group in state.groups:
        if group.role != "generate":
            continue
        cells: Sequence[RenderableType] = ("", "", "", "", "", "", "")
        if (held := group.generation) is not None:
            busy, kv = held.num_slots - held.num_free, held.kv
            used = kv.num_bytes - kv.num_bytes_free
            cells = (
                _bar(busy, held.num_slots),
                f"{busy}/{held.num_slots}",
                _bar(used, kv.num_bytes),
                f"{size(used)}/{size(kv.num_bytes)}",
                f"{held.last_step.duration_s * 1e3:.0f}" if held.HasField("last_step") else "-",
                _number(None if rates is None else rates.steps.get(group.name)),
                _accepted(held),
            )
        table.add_row(_name(group), _readiness(group), str(group.num_requests), *cells)
    return table


def prefill_table(state: ClusterState, rates: Rates | None) -> Table:
    """Return the table of prefill groups, with the running requests of each group and the number of jobs of each rank.
    A job is one attempt at prefilling one request."""
    table = _table("prefill", "state", "work>", "epoch>", "jobs/s>", "jobs by rank")
    for group in state.groups:
        if group.role != "prefill":
            continue
        jobs = None if rates is None else rates.jobs.get(group.name)
        table.add_row(
            _name(group),
            _readiness(group),
            str(group.num_requests),
            str(group.epoch),
            _number(jobs),
            "  ".join(_ranks(group)),
        )
    return table


def kv_table(state: ClusterState, rates: Rates | None) -> Table:
    """Return a table of the KV memory of all groups, by storage tier. The tiers are slots, prefix stores in memory, and
    prefix stores on disk. The disk tier is shown only if slots have read KV from disk. All groups of one node share a
    prefix store."""
    table = _table("KV", "", "used>", "of>", "read a second>")
    ledgers = [group.generation.kv for group in state.groups if group.generation is not None]
    if ledgers:
        whole = sum(each.num_bytes for each in ledgers)
        used = whole - sum(each.num_bytes_free for each in ledgers)
        pushed = "-" if rates is None else f"{size(rates.pushed_bytes)} pushed"
        table.add_row("slots", _bar(used, whole), size(used), size(whole), pushed)
    stores = {store.identity: store for store in _stores(state)}
    if stores:
        used, whole = (sum(getattr(each, field) for each in stores.values()) for field in ("num_bytes", "limit_bytes"))
        read = "-" if rates is None else size(rates.read_bytes["memory"])
        table.add_row("prefixes in memory", _bar(used, whole), size(used), size(whole), read)
        if any(each.num_disk_bytes_read for each in _stores(state)):
            table.add_row("prefixes on disk", "", "", "", "-" if rates is None else size(rates.read_bytes["disk"]))
    return table


def size(num_bytes: float) -> str:
    """Return a number of bytes as text of at most five characters, with a unit that is a power of 1024."""
    unit = 0
    while abs(num_bytes) >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f}{_UNITS[unit]}" if unit == 0 or num_bytes >= 99.95 else f"{num_bytes:.1f}{_UNITS[unit]}"


def _traffic(now: Snapshot, rates: Rates | None) -> Iterator[str]:
    state = now.state
    yield f"queue {state.num_queued} requests, {state.num_queued_tokens:,} tokens   running {state.num_running}"
    if rates is None or now.complaint:
        return
    cached = "" if rates.cached_share is None else f" ({rates.cached_share:.0%} cached)"
    yield (
        f"{_rate(rates.requests)} requests/s   {_rate(rates.output_tokens)} output tokens/s   "
        f"{_rate(rates.prompt_tokens)} prompt tokens/s{cached}"
    )
    first, token = (tuple(map(_ms, each)) for each in (rates.first_token_s, rates.token_s))
    refused = f"   {_rate(rates.refused)} refused/s" if rates.refused else ""
    yield f"first token p50 {first[0]} p95 {first[1]} ms   per token p50 {token[0]} p95 {token[1]} ms{refused}"


def _health(state: ClusterState) -> tuple[str, str]:
    if state.why_not_serving:
        return "NOT SERVING", "bold red"
    return ("degraded", "yellow") if state.why_degraded else ("serving", "green")


def _ranks(group: GroupState) -> Iterator[str]:
    """Yield for each rank the number of its jobs (attempts at prefilling one request), or the reason why it does not
    work."""
    for rank in range(len(group.endpoints)):
        status = group.ranks.get(rank)
        if status is None:
            yield f"{rank}: silent"
        elif status.stall or status.epoch_error:
            yield f"{rank}: {status.stall or status.epoch_error}"
        else:
            yield f"{rank}: {status.num_jobs}"


def _stores(state: ClusterState) -> list[PrefixStoreStatus]:
    """Return the prefix stores of all groups. Groups of one node report the same store."""
    return [store for group in state.groups if (store := group.prefix_store) is not None]


def _accepted(held: GenerationStatus) -> str:
    """Return the fraction of all drafts that were accepted."""
    if not held.HasField("speculation") or not held.speculation.num_drafted:
        return "-"
    return f"{held.speculation.num_accepted / held.speculation.num_drafted:.0%}"


def _name(group: GroupState) -> Text:
    return Text(f"{group.name}*" if group.lender else group.name, overflow="ellipsis", no_wrap=True)


def _readiness(group: GroupState) -> Text:
    return Text(group.readiness, style=_COLOURS[group.readiness])


def _bar(part: float, whole: float) -> ProgressBar:
    return ProgressBar(total=max(whole, 1), completed=max(part, 0), width=_BAR)


def _rate(value: float) -> str:
    """Return a rate as text with at least three digits."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def _table(*headings: str) -> Table:
    """Return an empty table. Columns whose headings end in > are right-aligned. Only the last column may wrap."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        side: JustifyMethod = "right" if heading.endswith(">") else "left"
        table.add_column(heading.rstrip(">"), justify=side, no_wrap=heading != headings[-1])
    return table
