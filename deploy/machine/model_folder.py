"""Prepares what a first use needs, and shows progress: the model's folder, and measurements of the kernels on this CPU.
Blocks."""

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from baton.errors import ConfigError, ModelError
from baton.modeling.checkpoints.catalog import resolve_model
from baton.modeling.kernels import native
from baton.modeling.kernels.kept_choice import load_choice
from baton.settings.paths import cache_folder
from baton.settings.place import WorkerPlace
from baton.types import KernelChoice
from deploy.config.cluster import ClusterConfig
from deploy.config.worker import Section
from deploy.machine.core_rates import kept_rates_path
from deploy.machine.hub import fetch_model, is_hub_name
from deploy.machine.kept_config import model_config
from generate_workers.config import EngineConfig

S = TypeVar("S", bound=Section)
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def resolve_folder(model: str, cache: Path, console: Console, *, weights: bool = True) -> Path:
    """Find, make or download the folder of `model`, showing progress on the console: a folder, a GGUF file, a known
    name, or the name of a model on a Hugging Face hub. Without `weights` a hub's are not downloaded. Blocks. Raises
    ModelError of one line."""
    if is_hub_name(model):
        return fetch_model(model, console, weights=weights)
    columns = (TextColumn("converting the model"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("")

    def advance(done: int, total: int) -> None:
        progress.start()  # nothing is shown before there is progress
        progress.update(task, completed=done, total=total)

    try:
        return resolve_model(model, cache=cache, progress=advance, finish=_write_tokenizer)
    finally:
        if progress.live.is_started:
            progress.stop()


def _write_tokenizer(gguf_path: Path, folder: Path) -> None:
    from baton.text.gguf_tokenizer import (
        write_tokenizer,  # imports transformers: a second, and mostly there is a folder
    )

    write_tokenizer(gguf_path, folder)


def folder_on_node(place: WorkerPlace) -> Path:
    """Return the folder of a worker's model on this node: the launcher's path if it exists here, or the same name below
    `model_search`, or a folder found or made by the model's name. Workers of a cluster compare the models that they
    have loaded. Blocks. Raises ModelError of one line."""
    for folder in (place.model_folder, *(each / place.model_folder.name for each in place.model_search)):
        if folder.is_dir():
            return folder
    try:
        return resolve_folder(place.model, cache_folder(), Console(stderr=True, highlight=False))
    except ModelError as error:
        searched = ", ".join(map(str, place.model_search)) or "empty"
        raise ModelError(f"{place.model_folder} is missing, model.search is {searched}, and {error}") from error


def path_on_node(path: Path, place: WorkerPlace, field: str) -> Path:
    """Return the path on this node of a file or folder that the configuration names by the launcher's path: the same
    path, or the same name below `model_search`. Raises ConfigError, which names the configuration's `field`, if neither
    exists."""
    for each in (path, *(folder / path.name for folder in place.model_search)):
        if each.exists():
            return each
    searched = ", ".join(map(str, place.model_search)) or "empty"
    raise ConfigError(f"{field} = {path} is missing, and model.search is {searched}: put a copy of that name there")


def section_on_node(section: S, place: WorkerPlace) -> S:
    """Return a worker's settings with their paths replaced by those on this node. Raises ConfigError."""
    if not isinstance(section, EngineConfig):
        return section

    def here(text: str, field: str) -> str:
        return str(path_on_node(Path(text), place, f"generate.{field}")) if text else ""

    return replace(
        section,
        selection_file=here(section.selection_file, "selection_file"),
        draft_model=here(section.draft_model, "draft_model"),
    )


def resolve_drafts(config: ClusterConfig, console: Console) -> ClusterConfig:
    """Return the configuration with the folder of `generate.draft_model` in place of its name, found or made as
    `resolve_folder` does; the same one without a draft model. Blocks. Raises ModelError of one line."""
    if not config.generate.draft_model:
        return config
    folder = resolve_folder(config.generate.draft_model, config.model.cache, console).absolute()
    return replace(config, generate=replace(config.generate, draft_model=str(folder)))


def prepare_kernels(console: Console) -> tuple[KernelChoice, ...]:
    """Measure which of the CPU's kernels are the fastest, unless that was done before. Runs in a process of its own,
    because a launcher does not import torch. Return the choice for this machine's kind of processor; empty when there
    is none, and then workers choose for themselves."""
    if native.may_need_measuring():
        with _doing("measuring the kernels on this processor", console):
            if reason := _failure_of("baton.modeling.kernels"):
                console.print(f"kernels cannot be measured ({reason}): workers measure them as they start")
    choice = load_choice()
    return () if choice is None else (choice,)


def prepare_rates(console: Console) -> None:
    """Measure the rates of a core with the kernels, the basis of the first predictions, unless that was done before.
    Runs in a separate process. Call it once the kernels are prepared."""
    if not kept_rates_path().exists():
        with _doing("measuring what a core of this processor reaches", console):
            if reason := _failure_of("deploy.machine.core_rates"):
                console.print(f"rates cannot be measured ({reason}): predictions begin with assumed ones")


def _doing(text: str, console: Console) -> AbstractContextManager[object]:
    """Show what is being done while the block runs: on a terminal with a spinner, elsewhere as a line."""
    if console.is_terminal:
        return console.status(text)
    console.print(text, markup=False, soft_wrap=True)
    return nullcontext()


def _failure_of(module: str) -> str:
    """Run a module as a program; return the last line that it printed about its failure, empty when it ended well."""
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return (run.stderr.strip().splitlines() or ["no message"])[-1] if run.returncode else ""


def require_alike(folder: Path, before: Path) -> None:
    """Raise ConfigError unless the model in `folder` equals that in `before` except for its weights. Configuration and
    tokenizer must be equal, so that requests, and streams that continue, have the same meaning for both. Raises
    ModelError when there is no model."""
    differing = [name for name in _TEXT_FILES if _content(folder / name) != _content(before / name)]
    if model_config(folder) != model_config(before):
        differing.insert(0, "config.json")
    if differing:
        raise ConfigError(f"{folder} and {before} differ in {differing[0]}: only weights may, start another cluster")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
