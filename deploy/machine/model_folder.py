"""Finds the folder of a model, converts the model if necessary, or downloads it, and shows the progress. Functions
block."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from baton.errors import ConfigError, ModelError
from baton.modeling.checkpoints.catalog import resolve_model
from baton.settings.paths import cache_folder
from baton.settings.place import WorkerPlace
from deploy.config.worker import Section
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.hub import fetch_model, is_hub_name
from deploy.machine.resolved_model import ResolvedModel
from deploy.options.screen import late_progress
from generate_workers.config import EngineConfig

S = TypeVar("S", bound=Section)
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def resolve_folder(model: str, cache: Path, console: Console, *, weights: bool = True) -> Path:
    """Find, convert or download a model, show the progress on the console, and return the model's folder. `model` is a
    folder, a GGUF file, a name that Baton knows, or the name of a model on a Hugging Face hub. `cache` is the folder
    for converted models. If `weights` is false, weights are not downloaded from a hub. Blocks. Raises ModelError with
    one line of text."""
    if is_hub_name(model):
        return fetch_model(model, console, weights=weights)
    with late_progress(console, "converting the model", MofNCompleteColumn(), TextColumn("tensors")) as show:
        return resolve_model(model, cache=cache, progress=show, finish=_write_tokenizer)


def _write_tokenizer(gguf_path: Path, folder: Path) -> None:
    from baton.text.gguf_tokenizer import (
        write_tokenizer,  # imports transformers: a second, and mostly there is a folder
    )

    write_tokenizer(gguf_path, folder)


def folder_on_node(place: WorkerPlace) -> Path:
    """Return the folder of a worker's model on this node. This is the launcher's path if it exists on this node.
    Otherwise it is a folder of the same name in one of the folders `place.model_search`. If neither exists, the model
    is found, converted or downloaded by its name.

    The supervisor checks later that all workers have loaded the same model. Blocks. Raises ModelError with one line of
    text.
    """
    for folder in (place.model_folder, *(each / place.model_folder.name for each in place.model_search)):
        if folder.is_dir():
            return folder
    try:
        return resolve_folder(place.model, cache_folder(), Console(stderr=True, highlight=False))
    except ModelError as error:
        searched = ", ".join(map(str, place.model_search)) or "empty"
        raise ModelError(f"{place.model_folder} is missing, model.search is {searched}, and {error}") from error


def path_on_node(path: Path, place: WorkerPlace, field: str) -> Path:
    """Return the path on this node of a file or folder of the configuration: `path` if it exists on this node,
    otherwise a file or folder of the same name in one of the folders `place.model_search`. If neither exists, raises
    ConfigError with a text that names the configuration's `field`."""
    for each in (path, *(folder / path.name for folder in place.model_search)):
        if each.exists():
            return each
    searched = ", ".join(map(str, place.model_search)) or "empty"
    raise ConfigError(f"{field} = {path} is missing, and model.search is {searched}: put a copy of that name there")


def section_on_node(section: S, place: WorkerPlace) -> S:
    """Return a copy of a worker's settings in which paths are valid on this node (see `path_on_node`). Raises
    ConfigError if a file or folder does not exist on this node."""
    if not isinstance(section, EngineConfig):
        return section

    def here(text: str, field: str) -> str:
        return str(path_on_node(Path(text), place, f"generate.{field}")) if text else ""

    return replace(
        section,
        selection_file=here(section.selection_file, "selection_file"),
        draft_model=here(section.draft_model, "draft_model"),
    )


def resolve_drafts(plan: ClusterPlan, console: Console) -> ClusterPlan:
    """Return a copy of `plan` in which `generate.draft_model` is a folder and not a name. The draft model is converted
    or downloaded if necessary. Return `plan` itself if it has no draft model. Blocks. Raises ModelError with one line
    of text."""
    config = plan.config
    if not config.generate.draft_model:
        return plan
    folder = resolve_folder(config.generate.draft_model, config.model.cache, console).absolute()
    return replace(plan, config=replace(config, generate=replace(config.generate, draft_model=str(folder))))


def require_alike(model: ResolvedModel, before: ResolvedModel) -> None:
    """Raise ConfigError unless `model` and `before` are equal except for their weights. Configuration and tokenizer
    must be equal, because new requests use `model` while running streams still use `before`. Raises ModelError when a
    folder does not contain a model."""
    differing = [name for name in _TEXT_FILES if _content(model.folder / name) != _content(before.folder / name)]
    if model.config != before.config:
        differing.insert(0, "config.json")
    if differing:
        where = f"{model.folder} and {before.folder} differ in {differing[0]}"
        raise ConfigError(f"{where}: only weights may, start another cluster")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
