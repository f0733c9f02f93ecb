"""Keeps the cores of loaded tokenizers in Baton's cache, so that workers load them without transformers.

transformers reads tokenizer.json, and then changes the tokenizer according to other files of the folder: it adds
tokens, for instance. The cache contains the result.
"""

import hashlib
import logging
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer as Core

from baton.process.whole_files import whole
from baton.settings.paths import cache_folder
from baton.text.core_tokenizer import CoreTokenizer

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files of a model's folder that determine the core."""
_FORMAT = 1
"""Version of the kept cores. Cores of other versions are not used."""


def load_core(folder: Path) -> CoreTokenizer:
    """Return the core of the tokenizer in `folder`. It is read from the cache, unless one of _FILES has changed since
    it was kept. Otherwise transformers loads it, which takes half a second longer. Blocks. Raises ModelError for
    missing or invalid files."""
    path: Path | None = None
    try:
        path = _path(folder)
        if path.is_file():
            return CoreTokenizer(Core.from_file(str(path)))
    except Exception:  # the tokenizers library raises bare Exceptions
        logger.warning("the tokenizer of %s cannot be read from the cache", folder, exc_info=True)
    from baton.text.tokenizer import Tokenizer  # imports transformers

    tokenizer = Tokenizer.load(folder)
    try:
        if path is not None and path == _path(folder):  # the files did not change meanwhile
            _keep(path, tokenizer)
    except (OSError, ValueError) as error:
        logger.warning("the tokenizer of %s cannot be kept in the cache: %s", folder, error)
    return tokenizer


def _keep(path: Path, tokenizer: CoreTokenizer) -> None:
    """Write the core to `path`, and remove earlier cores of the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        partial.write_bytes(tokenizer.to_json().encode())
    for earlier in path.parent.glob(f"{path.name.split('-')[0]}-*.json"):
        if earlier != path:
            earlier.unlink(missing_ok=True)


def _path(folder: Path) -> Path:
    """Return the path of the kept core. It depends on the folder, the content of _FILES, and the versions of the
    libraries. Raises OSError if a file cannot be read."""
    content = hashlib.blake2b(f"{_FORMAT} {version('tokenizers')} {version('transformers')}".encode(), digest_size=8)
    for path in (folder / name for name in _FILES):
        if path.is_file():
            content.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    owner = hashlib.blake2b(str(folder.absolute()).encode(), digest_size=8)
    return cache_folder() / "tokenizers" / f"{owner.hexdigest()}-{content.hexdigest()}.json"
