"""Checks limits on the number of lines of a file, lines of a function, and positional parameters. Prints violations,
medians and 90th percentiles.

`python tools/check_sizes.py [ROOT]` exits with status 1 if a limit is exceeded. Generated stubs are not counted.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL_PARAMETERS = 5

NOT_OURS = ("build", "dist")
GENERATED = ("baton", "v1")


@dataclass(frozen=True)
class Function:
    """Size of one function: its number of lines and its number of positional parameters."""

    name: str
    line: int
    num_lines: int
    num_positional: int
    """Number of parameters that may be passed by position. `self` and `cls` are not counted."""


def python_files(root: Path) -> Iterator[Path]:
    """Yield the project's own Python files in the folders of `root`, sorted. Hidden folders and generated stubs are
    skipped."""
    folders = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    for folder in sorted(folders):
        if folder.name not in NOT_OURS:
            for path in sorted(folder.rglob("*.py")):
                if path.relative_to(root).parts[: len(GENERATED)] != GENERATED:
                    yield path


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield the size of each function and method of a module. Nested functions are included."""
    methods = {
        id(item) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body
    }  # a method's first parameter is bound, not passed by the caller
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound = id(node) in methods and not _is_static(node)
            num_positional = len(node.args.posonlyargs) + len(node.args.args) - bound
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(node.name, node.lineno, num_lines, num_positional)


def breaches(name: str, num_lines: int, sizes: list[Function]) -> Iterator[str]:
    """Yield one line per exceeded limit in the file `name`. Each line has the location, the size and the limit."""
    if num_lines > MAX_FILE_LINES:
        yield f"{name}: {num_lines} lines (the limit is {MAX_FILE_LINES}): split it by concept"
    for size in sizes:
        where = f"{name}:{size.line} {size.name}"
        if size.num_lines > MAX_FUNCTION_LINES:
            yield f"{where}: {size.num_lines} lines (the limit is {MAX_FUNCTION_LINES}): extract what has a name"
        if size.num_positional > MAX_POSITIONAL_PARAMETERS:
            yield (
                f"{where}: {size.num_positional} positional parameters (the limit is {MAX_POSITIONAL_PARAMETERS}): "
                "pass a value object, or by keyword only"
            )


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in node.decorator_list)


def main(root: Path) -> int:
    """Check the Python files below `root`, and print the violations. Return the exit status."""
    found: list[str] = []
    lengths: list[int] = []
    num_files = 0
    for path in python_files(root):
        source = path.read_text(encoding="utf-8")
        sizes = list(functions(ast.parse(source, filename=str(path))))
        found.extend(breaches(str(path.relative_to(root)), len(source.splitlines()), sizes))
        lengths.extend(size.num_lines for size in sizes)
        num_files += 1
    if len(lengths) < 2:
        print(f"{root}: no functions found: is this the project's root?")
        return 1
    deciles = statistics.quantiles(lengths, n=10, method="inclusive")
    print(f"{num_files} files, {len(lengths)} functions; lines a function: p50 {deciles[4]:.0f}, p90 {deciles[8]:.0f}")
    print("\n".join(found) if found else "sizes: all within limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()))
