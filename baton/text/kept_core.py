"""Keeps the cores of loaded tokenizers in Baton's cache, so that workers load them without transformers.

transformers may change what a folder's tokenizer.json says, by the other files of the folder. Therefore the core is
stored as it is after that.
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

_SUFFIXES = (".json", ".jinja", ".txt")
"""Ends of the names of files that transformers may read for a tokenizer."""
_INDEX = ".index.json"
"""End of the name of a file that lists the shards of weights."""


def load_core(folder: Path) -> CoreTokenizer:
    """Return the core of the tokenizer in `folder`. The first call on a machine takes a second, and later calls a tenth
    of it, unless the folder has changed. Blocks. Raises ModelError for missing or invalid files."""
    try:
        path = _path(folder)
        if path.is_file():
            return CoreTokenizer(Core.from_file(str(path)))
    except Exception:  # the tokenizers library raises bare Exceptions
        logger.warning("the kept tokenizer of %s is written again", folder, exc_info=True)
    from baton.text.tokenizer import Tokenizer  # imports transformers

    tokenizer = Tokenizer.load(folder)
    try:
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            partial.write_text(tokenizer.to_json())
    except OSError as error:
        logger.warning("the tokenizer of %s is not kept in the cache: %s", folder, error)
    return tokenizer


def _path(folder: Path) -> Path:
    """Return the path of the kept core. It depends on the content of the folder's files and on the versions of the
    libraries."""
    found = hashlib.blake2b(f"{version('tokenizers')} {version('transformers')}".encode(), digest_size=16)
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.name.endswith(_SUFFIXES) and not path.name.endswith(_INDEX):
            found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return cache_folder() / "tokenizers" / f"{found.hexdigest()}.json"
