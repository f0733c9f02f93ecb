"""Measures how easy it is to navigate the code. docs/house.md shows the results.

`python -m tools.measure_house [ROOT]` prints the figures of the checkout at ROOT as a Markdown table. Terms:

- Product: the files that a wheel installs, without the package baton_lab and generated stubs.
- Room of a package: a module or a folder directly inside the package.
- Levels: the number of rooms on the longest path along imports. Rooms that import each other in a circle count as one.
- Copying configuration by hand: a call that creates a Config, a Section or a Host, if at least three of its keyword
  arguments pass an attribute of the same name, as in `ttl_s=section.ttl_s`.
"""

import ast
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.check_prose import hits_in
from tools.check_sizes import functions

NO_PRODUCT = ("baton_lab", "benchmarks", "tests", "tools")
REPEATED_FILES = ("__init__", "__main__", "port", "config", "host", "servicer", "errors", "routes", "bodies")
"""Names of files that are allowed to occur in any number of folders."""
MOST_PARAMETERS = 5
LONG_FILE_LINES = 330
CONFIGURED = ("Config", "Section", "Host")
"""Name suffixes of classes that hold configuration or are created from configuration."""
LEAST_COPIES = 3
"""Minimum number of keyword arguments of the form `name=something.name` that make a call count as copying configuration
by hand."""


def main(root: Path) -> int:
    """Print the table of figures for the checkout at `root`. Return the exit status."""
    packages = [path.parent.name for path in sorted(root.glob("*/__init__.py")) if path.parent.name not in NO_PRODUCT]
    files = [path for package in packages for path in python_files(root / package)]
    trees = {path: parsed(path) for path in files}
    classes = [node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = [path.stem for path in files if path.stem not in REPEATED_FILES]
    lengths = sorted(each.num_lines for tree in trees.values() for each in functions(tree))
    deciles = statistics.quantiles(lengths, n=10, method="inclusive")
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = sum(number > LONG_FILE_LINES for number in lines.values())
    crowded = max((len(entries(folder)), folder) for folder in {path.parent for path in files})
    refused = sum(hit.scope == "docstring" for hit in hits_in(root))
    rows: list[tuple[str, int | str]] = [
        ("product files", len(files)),
        ("product lines", sum(lines.values())),
        ("product lines without comments, docstrings and blank lines", sum(map(code_lines, files, trees.values()))),
        (
            "the same lines of baton_lab",
            sum(code_lines(path, parsed(path)) for path in python_files(root / "baton_lab")),
        ),
        ("classes", len(classes)),
        ("class names that are used twice", repeated(classes, 1)),
        ("file names that are used more than twice", repeated(names, 2)),
        (f"functions with more than {MOST_PARAMETERS} parameters", sum(map(wide_functions, trees.values()))),
        (f"files above {LONG_FILE_LINES} lines", long),
        ("entries of the most crowded folder", f"{crowded[0]} ({crowded[1].relative_to(root)})"),
        ("lines of a function, p50 / p90", f"{deciles[4]:.0f} / {deciles[8]:.0f}"),
        ("wordings in docstrings that the lint refuses", refused),
        ("lines that copy configuration by hand", sum(copied_lines(tree) for tree in trees.values())),
    ]
    for package in packages:
        graph = rooms(root, package)
        rows.append((f"rooms / levels of {package}", f"{len(graph)} / {levels(graph)}"))
    print("| figure | value |", "|---|---|", sep="\n")
    for name, value in rows:
        print(f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value} |")
    return 0


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def repeated(names: list[str], most: int) -> int:
    """Return how many different names occur more than `most` times in `names`."""
    return sum(number > most for number in Counter(names).values())


def wide_functions(tree: ast.Module) -> int:
    """Return the number of functions with more than `MOST_PARAMETERS` parameters. Keyword-only parameters are counted;
    `self` and `cls` are not."""
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bound = [id(node) in methods and "staticmethod" not in map(ast.unparse, node.decorator_list) for node in found]
    arguments = [(*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) for node in found]
    return sum(len(each) - is_bound > MOST_PARAMETERS for each, is_bound in zip(arguments, bound, strict=True))


def python_files(folder: Path) -> list[Path]:
    """Return the sorted paths of all Python files below a folder. Generated stubs are left out."""
    return [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "v1"]


def entries(folder: Path) -> list[Path]:
    """Return the files and folders directly inside a folder. Cache folders are left out."""
    return [path for path in folder.iterdir() if path.name != "__pycache__"]


def code_lines(path: Path, tree: ast.Module) -> int:
    """Return the number of lines of code in a file. Blank lines, comments and docstrings are not counted."""
    texts = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        held = {
            number
            for token in tokenize.tokenize(file.readline)
            if token.type not in layout and token.type != tokenize.ENCODING
            for number in range(token.start[0], token.end[0] + 1)
        }
    return len(held - texts)


def copied_lines(tree: ast.Module) -> int:
    """Return the number of keyword arguments of the form `name=something.name` in calls that copy configuration by
    hand, i.e. that have at least `LEAST_COPIES` such arguments."""
    copies = [
        sum(isinstance(each.value, ast.Attribute) and each.value.attr == each.arg for each in node.keywords)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(CONFIGURED)
    ]
    return sum(number for number in copies if number >= LEAST_COPIES)


def rooms(root: Path, package: str) -> dict[str, set[str]]:
    """Return the imports between the rooms of a package. A room is a module or a folder directly inside the package.
    The result has, for each room, the other rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for path in python_files(root / package):
        room = path.relative_to(root / package).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        below = (name.split(".")[1] for name in imported(path) if name.startswith(f"{package}."))
        graph.setdefault(room, set()).update(below)
    return {room: {each for each in others if each in graph and each != room} for room, others in graph.items()}


def imported(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports. They are names of modules, or of objects in modules."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def levels(graph: dict[str, set[str]]) -> int:
    """Return the number of nodes on the longest path through an import graph. `graph` has, for each module or folder of
    a package, the others that it imports. Nodes that import each other in a circle count as one."""

    @cache
    def reach(room: str) -> frozenset[str]:
        seen, pending = {room}, [room]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        return frozenset(seen)

    @cache
    def depth(room: str) -> int:
        circle = {each for each in reach(room) if room in reach(each)}
        below = {other for each in circle for other in graph[each]} - circle
        return 1 + max((depth(other) for other in below), default=0)

    return max((depth(room) for room in graph), default=0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()))
