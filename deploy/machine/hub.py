"""Models by their name on a Hugging Face hub: downloads the files that Baton reads into the hub's own cache.

`deploy.machine.model_folder` downloads a model before the cluster is started. All work is done by `huggingface_hub`,
which reads its own environment variables: HF_ENDPOINT names a mirror, HF_TOKEN identifies the user, HF_HOME is the
cache, and HF_HUB_OFFLINE forbids downloads. After a lost connection, a download continues where it stopped, or at most
one chunk earlier. Complete files are never downloaded again. Functions block.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, TransferSpeedColumn

from baton.errors import ModelError
from deploy.options.screen import late_progress

_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
"""Pattern of a model's name on a hub: ORGANISATION/NAME, optionally followed by `@` and a branch, tag or commit."""
_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
]
_WEIGHT_FILES = ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
"""Patterns of the weight files that are downloaded. Files of other formats, and copies of the weights in subfolders,
are not downloaded."""


def is_hub_name(model: str) -> bool:
    """Return True if `model` is the name of a model on a hub. Such a name has the form ORGANISATION/NAME, optionally
    with `@REVISION`, and is not an existing path."""
    return _ID.fullmatch(model) is not None and not Path(model).expanduser().exists()


def fetch_model(model: str, console: Console, *, weights: bool = True) -> Path:
    """Return the folder of `model` in the hub's cache, with all files that Baton reads. If `weights` is false, the
    weights may be missing.

    Missing files are downloaded, and the console shows the progress. Small files are downloaded first. If Baton cannot
    serve the model, ModelError is raised before the weights are downloaded. ModelError is also raised if files must be
    downloaded, but the hub cannot be reached, does not have the model, or denies the user access to the model. The
    error's text is one line.
    """
    from httpx2 import HTTPError  # huggingface_hub uses httpx2, and raises its errors
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    found = _ID.fullmatch(model)
    assert found is not None, model
    repository, revision = found["repository"], found["revision"]
    try:
        with late_progress(console, f"downloading {model}", DownloadColumn(), TransferSpeedColumn()) as show:
            bars = _bars(show)
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_TEXT_FILES, tqdm_class=bars))
            _require(model, folder, "config.json", "tokenizer.json")
            if not weights:
                return folder
            if not _has_weights(folder):
                _require_servable(folder)
            patterns = _TEXT_FILES + _WEIGHT_FILES
            # The commit of the first call, not the name, so that both calls read the same state of the repository.
            folder = Path(snapshot_download(repository, revision=folder.name, allow_patterns=patterns, tqdm_class=bars))
    except HFValidationError as error:
        raise ModelError(f"model {model!r} is not the name of a model ({_one_line(error)}): correct it") from error
    except (HTTPError, OSError) as error:
        raise _failure(model, error) from error
    if not _has_weights(folder):
        remedy = "choose a repository that holds safetensors, or download a .gguf file and name that"
        raise ModelError(f"model {model!r} has no model.safetensors on the hub; {remedy}")
    return folder


def _bars(show: Callable[[int, int], None]) -> type[Any]:
    """Return the class of progress bars for `huggingface_hub`. Bars that count bytes call `show`; no bar draws anything
    itself."""
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                with lock:
                    self.n += n or 0
                    show(int(self.n), int(self.total or 0))

    return Bar


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in _WEIGHT_FILES)


def _require(model: str, folder: Path, *names: str) -> None:
    """Raise ModelError unless the hub has the files of these names."""
    for name in names:
        if not (folder / name).is_file():
            remedy = "choose a repository in transformers' format, or download a .gguf file and name that"
            raise ModelError(f"model {model!r} has no {name} on the hub; {remedy}")


def _require_servable(folder: Path) -> None:
    """Raise ModelError for a model whose configuration files show that none of Baton's model families can read it."""
    from baton.modeling.checkpoints.weights import load_config  # imports torch: short, compared with the download

    load_config(folder)


def _failure(model: str, error: Exception) -> ModelError:
    """Return the error to raise for a failure of the hub's client."""
    from httpx2 import ConnectError
    from huggingface_hub import constants, errors

    hub = f"the hub {constants.ENDPOINT}"
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"model {model!r}: {hub} requires a login; accept the model's terms there, and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "correct the name, or set HF_TOKEN if it is private"
        return ModelError(f"model {model!r} is neither a folder here nor a model on {hub}; {remedy}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"model {model!r}: {hub} has the model, but not this revision; correct it")
    if isinstance(error, errors.IncompleteSnapshotError):
        remedy = "unset HF_HUB_OFFLINE, or try again once the hub can be reached"
        return ModelError(f"model {model!r} is not whole in {constants.HF_HUB_CACHE}; {remedy}")
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectError):
        remedy = "give a folder, name a mirror by HF_ENDPOINT, or fill that cache on a machine that reaches it"
        where = f"nor in {constants.HF_HUB_CACHE}, and {hub} cannot be reached ({_one_line(error)})"
        return ModelError(f"model {model!r} is neither a folder here {where}; {remedy}")
    remedy = "try again: files that are whole are kept"
    return ModelError(f"model {model!r} cannot be fetched from {hub}: {_one_line(error)}; {remedy}")


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
