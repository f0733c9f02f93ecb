"""Caches the configurations of models on the disk, so that a process that loads no weights knows a model's shape
without torch.

A model's config.json is read by its family (`baton.modeling.checkpoints.weights`), whose layers import torch, which
takes seconds. The result is kept in the cache folder, in a file whose name is a hash of the files that were read and of
the code that read them. So a change of either one is always noticed. Blocks on the disk.
"""

import hashlib
import logging
from pathlib import Path

import baton.modeling
from baton.errors import ConfigError
from baton.modeling.checkpoints.stored_format import FORMAT_FILES
from baton.modeling.forward.model_config import ModelConfig
from baton.process.whole_files import whole
from baton.settings.base import from_json, to_json
from baton.settings.paths import cache_folder

logger = logging.getLogger(__name__)

_READ_FILES = ("generation_config.json", *FORMAT_FILES)
"""Files of a model's folder that determine its configuration."""
_READERS = ("checkpoints/*.py", "families/*.py", "quantized/*.py", "forward/model_config.py")
"""Files of `baton.modeling` whose code reads the files of `_READ_FILES`."""


def model_config(folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`. Reads the kept file, or else the model's own files, and keeps
    the result. Raises ModelError for a model that is not supported."""
    path = _kept_path(folder)
    try:
        if path.exists():
            return from_json(ModelConfig, path.read_bytes())
    except (OSError, ConfigError) as error:
        logger.warning("%s cannot be read (%s): the model's configuration is read again", path, error)
    from baton.modeling.checkpoints.weights import load_config  # imports torch

    config = load_config(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            partial.write_text(to_json(config))
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next start reads the model's configuration again", path, error)
    return config


def _kept_path(folder: Path) -> Path:
    """Return the path of the kept configuration of the model in `folder`; the file may not exist."""
    root = Path(baton.modeling.__path__[0])
    code = sorted(path for pattern in _READERS for path in root.glob(pattern))
    parts = [path.read_bytes() if path.is_file() else b"" for path in (*(folder / name for name in _READ_FILES), *code)]
    digest = hashlib.blake2b(b"\0".join(hashlib.blake2b(part).digest() for part in parts), digest_size=16)
    return cache_folder() / "configs" / f"{digest.hexdigest()}.json"
