"""What a first use makes, shown while it is made: the model's folder, and the CPU's kernels. Blocks."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from baton.errors import ConfigError
from baton.types import KernelChoice
from modeling.checkpoints.catalog import resolve_model
from modeling.kernels import native
from modeling.kernels.kept_choice import load_choice
from text.gguf_tokenizer import write_tokenizer

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def resolve_folder(model: str, cache: Path, console: Console) -> Path:
    """Finds or makes the folder of `model`; blocks. Raises ModelError, one line."""
    columns = (TextColumn("converting the model"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("")

    def advance(done: int, total: int) -> None:
        progress.start()  # not before there is something to show
        progress.update(task, completed=done, total=total)

    try:
        return resolve_model(model, cache=cache, progress=advance, finish=write_tokenizer)
    finally:
        if progress.live.is_started:
            progress.stop()


def prepare_kernels(console: Console) -> tuple[KernelChoice, ...]:
    """Build the CPU's kernels and measure which are the fastest, where that has not been done; in a process of its own,
    for a launcher has no torch. Return the choice for this machine's kind of processor; empty where there is none, and
    workers choose for themselves."""
    if native.may_need_building():
        with console.status("building kernels for this processor, and measuring them"):
            run = subprocess.run(
                [sys.executable, "-m", "modeling.kernels"],
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
            console.print(f"kernels cannot be prepared ({reason}): workers do without, or build them as they start")
    choice = load_choice()
    return () if choice is None else (choice,)


def require_alike(folder: Path, before: Path) -> None:
    """Raises ConfigError unless the model in `folder` is that of `before` but for its weights: the same configuration
    and tokenizer, so that requests, and what is left of them, mean the same to both; ModelError when there is none."""
    from modeling.checkpoints.weights import load_config  # takes torch along

    differing = [name for name in _TEXT_FILES if _content(folder / name) != _content(before / name)]
    if load_config(folder) != load_config(before):
        differing.insert(0, "config.json")
    if differing:
        raise ConfigError(f"{folder} and {before} differ in {differing[0]}: only weights may, start another cluster")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
