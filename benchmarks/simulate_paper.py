"""Compares the predictions of the cost model with the measurements in the tables of the KV-Runahead paper (ICML 2024),
cell by cell.

The model is calibrated on Llama-7B only. Linear and attention times are fitted to the paper's one-GPU times. The time
to launch a layer's kernels, and the latency of a message, are fitted to the times for 1k tokens, where these dominate.
The times of other models follow from their FLOPs and bytes, without fitted factors. The ranks compute as in the paper's
table 5 (`baton_lab.study.protocols.PAPER`), and partitions into chunks are searched at a resolution of 64 tokens.

`python -m benchmarks.simulate_paper` prints the tables in Markdown. `benchmarks/results/calculated/simulate.md` has the
tables, and explains their columns.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import CostModel, Kernel, LinkModel, Protocol
from baton.planning.hardware import Hardware, derive
from baton_lab.study.known_models import SHAPES
from baton_lab.study.peers import single, tsp
from baton_lab.study.prefill_fit import fit_prefill
from baton_lab.study.protocols import PAPER, PAPER_OVERLAPPED

TABLES = Path(__file__).parents[1] / "tests" / "data" / "kv_runahead_tables.json"
REFERENCE = "llama-7b"
NVLINK = 300e9
A100_MEMORY = 1.555e12
A100_MATMUL = 1.56e14
"""Rate in FLOP/s of an attention kernel that does not store its scores in memory, on an A100. Assumed to be half of the
peak rate of dense fp16 matrix products."""
RESOLUTION = 64
RANKS = (4, 8)
SLOW_RANKS = (2, 4)
SLOW_PROTOCOLS = {10: PAPER, 1: PAPER_OVERLAPPED}
"""How the ranks of a chain receive KV on slow links, by bandwidth in GB/s. The paper's times at 10 GB/s match blocking
receives (2 % median error on two ranks). Its times at 1 GB/s on two ranks are possible only with receives that overlap
with computation."""
ROUNDING_S = 0.005
"""Maximum rounding error of the paper's times in seconds. The paper prints two decimals."""
MISPRINT = (4096, 2, 1)
"""Cell of the paper's table that is probably a misprint: (context tokens, ranks, GB/s). Its value of 0.84 s is
inconsistent with the neighbouring cells."""


@dataclass(frozen=True)
class Cell:
    """One value in the paper and its prediction, in seconds or as a ratio of seconds."""

    model: str
    context: int
    ranks: int
    what: str
    """Measured quantity: `tsp` or `kvr_s` for the time to first token of this scheme, or `speedup` for the ratio of
    TSP's time to KVR-S's. All of them are for the paper's fast link (NVLink)."""
    paper: float
    ours: float

    @property
    def error(self) -> float:
        """Error of the prediction, positive if the prediction is too large. For times, it is a fraction of the paper's
        time. For speedups, it is the difference between prediction and paper."""
        return self.ours - self.paper if self.what == "speedup" else self.ours / self.paper - 1


@dataclass(frozen=True)
class SlowRow:
    """Times for one context length and link of the paper's table 3. `paper` and `ours` map the number of ranks,
    including 1, to the measured and the predicted seconds."""

    context: int
    gb_s: int
    paper: dict[int, float]
    ours: dict[int, float]

    def best_in_paper(self) -> int:
        """Return how many ranks are fastest in the paper: the key of `paper` with the shortest time. If several keys
        have the same time, return the smallest."""
        return min(self.paper, key=lambda ranks: (self.paper[ranks], ranks))

    def best_of_ours(self, margin: float) -> int:
        """Return the smallest number of ranks whose predicted time is close to the shortest one: at most (1 + margin)
        times the shortest predicted time, plus ROUNDING_S (the rounding error of the paper's times)."""
        most_s = min(self.ours.values()) * (1 + margin) + ROUNDING_S
        return min(ranks for ranks, ttft_s in self.ours.items() if ttft_s <= most_s)


def load_tables(path: Path = TABLES) -> dict[str, Any]:
    """Read the paper's tables from their JSON file."""
    tables: dict[str, Any] = json.loads(path.read_text())
    return tables


def calibrate(tables: dict[str, Any]) -> Hardware:
    """Fit the rates of the paper's GPUs to the paper's times of Llama-7B."""
    shape = SHAPES[REFERENCE]
    row = [(each["context_tokens"], each["one_gpu"]) for each in tables["low_bandwidth_llama_7b"]]
    fitted = fit_prefill(row, shape.num_layers, Kernel.DENSE)
    issue_s, latency_s = _issue_and_latency(tables["ttft"][REFERENCE][0])
    return Hardware(
        linear_flops=shape.linear_flops / fitted.linear_s,
        pair_flops=A100_MATMUL,
        link=LinkModel(latency_s, NVLINK),
        scores_per_s=shape.num_heads / fitted.pair_s,
        memory_bandwidth=A100_MEMORY,
        fixed_s=fitted.fixed_s,
        issue_s=issue_s,
    )


def _issue_and_latency(shortest: dict[str, float]) -> tuple[float, float]:
    """Fit issue time and latency to the shortest row by least squares. The time of a layer is issue + latency * (number
    of consecutive messages) + time of its bytes. An all-gather has n - 1 consecutive messages, a chain one."""
    shape, context = SHAPES[REFERENCE], shortest["context_tokens"]
    columns, seconds = [], []
    for ranks in RANKS:
        bytes_s = (ranks - 1) / ranks * context * shape.kv_bytes / NVLINK
        copy_s = 2 * context * shape.kv_bytes / A100_MEMORY
        columns += [(1.0, ranks - 1.0), (1.0, 1.0)]
        seconds += [
            shortest[f"tsp_{ranks}"] / shape.num_layers - bytes_s - copy_s,
            shortest[f"kvr_s_{ranks}"] / shape.num_layers - bytes_s,
        ]
    issue_s, latency_s = np.linalg.lstsq(np.array(columns), np.array(seconds), rcond=None)[0]
    return float(issue_s), float(latency_s)


def cost_of(model: str, hardware: Hardware) -> CostModel:
    """Return the cost model of a model. The output head costs nothing, because its time is already included in the
    one-GPU times to which the rates are fitted."""
    return dataclasses.replace(derive(SHAPES[model], hardware), head_s=0.0)


def kvr_s(context: int, ranks: int, cost: CostModel, protocol: Protocol = PAPER) -> float:
    """Return the predicted time to first token in seconds of a chain whose chunk sizes are searched (KVR-S)."""
    chunks = search(context, ranks, cost, protocol, resolution=RESOLUTION)
    return float(chain_ttft(chunks, cost, protocol))


def fast_cells(tables: dict[str, Any], hardware: Hardware) -> Iterator[Cell]:
    """Yield all cells of the paper's tables for NVLink, with predictions."""
    for model, rows in tables["ttft"].items():
        cost = cost_of(model, hardware)
        for row in rows:
            context = row["context_tokens"]
            for ranks in RANKS:
                ours = {"tsp": tsp(context, ranks, cost, Kernel.DENSE), "kvr_s": kvr_s(context, ranks, cost)}
                ours["speedup"] = ours["tsp"] / ours["kvr_s"]
                for what, value in ours.items():
                    yield Cell(model, context, ranks, what, row[f"{what}_{ranks}"], value)


def slow_rows(tables: dict[str, Any], hardware: Hardware) -> Iterator[SlowRow]:
    """Yield the rows of the paper's table 3 (slow links), with predictions."""
    for gb_s, protocol in SLOW_PROTOCOLS.items():
        link = dataclasses.replace(hardware.link, bandwidth=gb_s * 1e9)
        cost = dataclasses.replace(cost_of(REFERENCE, hardware), link=link)
        for row in tables["low_bandwidth_llama_7b"]:
            context = row["context_tokens"]
            ours = {ranks: kvr_s(context, ranks, cost, protocol) for ranks in SLOW_RANKS}
            paper = {ranks: row[f"kvr_{ranks}_{gb_s}GBps"] for ranks in SLOW_RANKS}
            one_s = single(context, cost, Kernel.DENSE)
            yield SlowRow(context, gb_s, {1: row["one_gpu"], **paper}, {1: one_s, **ours})


def median_error(cells: list[Cell], least_context: int) -> float:
    """Return the median absolute relative error of the predicted times at contexts of at least `least_context`
    tokens."""
    return statistics.median(
        abs(cell.error) for cell in cells if cell.what != "speedup" and cell.context >= least_context
    )


def speedups(cells: list[Cell], least_context: int) -> list[Cell]:
    """Return the cells with speedups at contexts of at least `least_context` tokens, ordered by error, largest
    first."""
    chosen = [cell for cell in cells if cell.what == "speedup" and cell.context >= least_context]
    return sorted(chosen, key=lambda cell: -abs(cell.error))


def print_hardware(hardware: Hardware) -> None:
    """Print one line per calibrated rate: its field in Hardware, its value, its meaning, and its source."""
    fitted_to_one, fitted_to_1k = "fitted to the times on one GPU", "fitted to the times of 1k tokens"
    print_heading("field of `Hardware`", "value", "meaning", "source")
    for name, value, meaning, source in (
        ("linear_flops", f"{hardware.linear_flops / 1e12:.2f} TFLOP/s", "speed of matrix products", fitted_to_one),
        ("scores_per_s", f"{hardware.scores_per_s / 1e9:.2f} billion/s", "rate of attention scores", fitted_to_one),
        ("fixed_s", f"{hardware.fixed_s * 1e6:.2f} us", "time that is added to each layer", fitted_to_one),
        ("issue_s", f"{hardware.issue_s * 1e3:.3f} ms", "minimum time of a layer: launching its kernels", fitted_to_1k),
        ("link.latency_s", f"{hardware.link.latency_s * 1e6:.2f} us", "latency of a message", fitted_to_1k),
        ("link.bandwidth", f"{hardware.link.bandwidth / 1e9:.0f} GB/s", "bandwidth of NVLink", "given in the paper"),
        (
            "memory_bandwidth",
            f"{hardware.memory_bandwidth / 1e9:,.0f} GB/s",
            "bandwidth of memory copies",
            "nominal value of an A100",
        ),
        (
            "pair_flops",
            f"{hardware.pair_flops / 1e12:.0f} TFLOP/s",
            "speed of attention kernels that do not store scores; not used here",
            "half of an A100's peak",
        ),
    ):
        print(f"| `{name}` | {value} | {meaning} | {source} |")


def print_fast(cells: list[Cell]) -> None:
    """Print one line per model, context length and number of GPUs. It contains the paper's value, the predicted value
    and the error of both times and of the speedup."""
    times = [f"{scheme} {what}" for scheme in ("TSP", "KVR-S") for what in ("paper, s", "predicted, s", "error, %")]
    print_heading("model", "context", "GPUs", *times, *(f"speedup {what}" for what in ("paper", "predicted", "error")))
    for index in range(0, len(cells), 3):
        base, chain, ratio = cells[index : index + 3]
        print(
            f"| {base.model} | {base.context // 1024}k | {base.ranks} "
            f"| {base.paper:.3f} | {base.ours:.3f} | {100 * base.error:+.1f} "
            f"| {chain.paper:.3f} | {chain.ours:.3f} | {100 * chain.error:+.1f} "
            f"| {ratio.paper:.2f} | {ratio.ours:.2f} | {ratio.error:+.2f} |"
        )


def print_slow(rows: list[SlowRow], margin: float) -> None:
    """Print one line per link and context length: the paper's and the predicted seconds, and the best number of GPUs
    according to each."""
    counts = ("1 GPU", *(f"{ranks} GPUs" for ranks in SLOW_RANKS))
    times = [f"{count} {what}, s" for count in counts for what in ("paper", "predicted")]
    print_heading("GB/s", "context", *times, "best number of GPUs, paper", "best number of GPUs, predicted")
    for row in rows:
        seconds = " | ".join(f"{row.paper[ranks]:.2f} | {row.ours[ranks]:.3f}" for ranks in (1, *SLOW_RANKS))
        best = f"{row.best_in_paper()} | {row.best_of_ours(margin)}"
        print(f"| {row.gb_s} | {row.context // 1024}k | {seconds} | {best} |")


def print_heading(*headings: str) -> None:
    """Print the first two lines of a Markdown table."""
    print(f"| {' | '.join(headings)} |")
    print("|---" * len(headings) + "|")


def main() -> int:
    """Print the tables and the median errors of their predictions. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="the paper's tables (JSON)")
    tables = load_tables(parser.parse_args().tables)
    hardware = calibrate(tables)
    cells = list(fast_cells(tables, hardware))
    median = median_error(cells, 4096)
    print("### Calibration\n")
    print_hardware(hardware)
    print("\n### NVLink, 300 GB/s\n")
    print_fast(cells)
    print(f"\nMedian of the absolute errors of times from 4k tokens on: {100 * median:.1f} %")
    print("\n### Slow links, Llama-7B, KVR-S\n")
    print_slow(list(slow_rows(tables, hardware)), median)
    return 0


if __name__ == "__main__":
    sys.exit(main())
