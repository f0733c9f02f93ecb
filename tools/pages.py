"""Writes the pages of docs/reference/ that are generated from the code, or checks that they are up to date.

`python -m tools.pages` writes the pages. With `--check` it writes nothing, and exits with status 1 if a page is out of
date.
"""

import argparse
import sys
from pathlib import Path

from tools import cli_page, limits_page

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES = {"cli.md": cli_page.page, "limits.md": limits_page.page}


def main() -> int:
    """Write or check the generated pages. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a page is stale")
    only_checks = parser.parse_args().check
    stale = [name for name, make in PAGES.items() if _text(FOLDER / name) != make()]
    for name in stale:
        if only_checks:
            print(f"docs/reference/{name} is stale: run `python -m tools.pages`", file=sys.stderr)
        else:
            (FOLDER / name).write_text(PAGES[name]())
    return 1 if stale and only_checks else 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
