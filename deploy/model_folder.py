"""What a first use makes, shown while it is made: the model's folder, and the CPU's kernels. Blocks."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from modeling.catalog import resolve_model
from modeling.kernels import native
from text.gguf_tokenizer import write_tokenizer


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


def prepare_kernels(console: Console) -> None:
    """Builds the CPU's kernels if they may be missing, in a process of its own: a launcher has no torch. Workers build
    what is still missing, or do without."""
    if native.may_need_building():
        with console.status("building kernels for this processor"):
            subprocess.run([sys.executable, "-m", "modeling.kernels"], check=False, capture_output=True)
