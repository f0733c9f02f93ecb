"""Refuses docstrings that cannot be read alone: too short, beginning like the end of another sentence, or riddles.

Looks at modules, classes, public functions and methods, and the notes below fields and constants. A docstring must have
at least four words, must not begin with Of, That, As, And, Or or a word for "in the same way", and must not contain a
pronoun that hides its noun.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

FOLDERS = (
    "baton",
    "text",
    "planning",
    "modeling",
    "transport",
    "orchestrator",
    "prefill_workers",
    "generate_workers",
    "gateway",
    "deploy",
    "baton_lab",
    "benchmarks",
    "tools",
)
LEAST_WORDS = 4
CONTINUATIONS = ("of", "that", "likewise", "as", "and", "or")
"""Words with which a docstring continues another, or its own name."""
RIDDLES = ("likewise", "whoever", "whomever", "whom", "nobody")
"""Words that stand for a noun that the reader has to guess."""


def main() -> int:
    """Print what is refused, one docstring a line, and how many; return 1 when there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders to look at")
    refused = [line for folder in parser.parse_args().folders for line in refusals(Path(folder))]
    for line in refused:
        print(line)
    print(f"docstrings: {len(refused)} refused" if refused else "docstrings: all can be read alone")
    return 1 if refused else 0


def refusals(folder: Path) -> Iterator[str]:
    """Yield `path:line name: reason` for each docstring below a folder that is refused."""
    for path in sorted(folder.rglob("*.py")):
        if path.parts[:2] == ("baton", "v1"):
            continue
        for name, node in docstrings(ast.parse(path.read_text())):
            reason = why_refused(str(node.value))
            if reason:
                yield f"{path}:{node.lineno} {name}: {reason}"


def why_refused(text: str) -> str:
    """Return why a docstring cannot be read alone; empty when it can."""
    words = re.findall(r"[\w'`./-]+", text)
    if len(words) < LEAST_WORDS:
        return f"{len(words)} words, at least {LEAST_WORDS}"
    if words[0].lower() in CONTINUATIONS:
        return f"begins with {words[0]!r}"
    riddle = next((word for word in words if word.lower() in RIDDLES), "")
    return f"says {riddle!r}: name who or what is meant" if riddle else ""


def docstrings(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    """Yield the docstrings of a module, its classes and public functions, and the notes below fields and constants."""
    pending: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [("module", tree)]
    while pending:
        name, scope = pending.pop()
        first = scope.body[0] if scope.body else None
        if isinstance(first, ast.Expr) and is_text(first.value):
            yield name, first.value
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and name != "__init__":
            continue
        for before, node in zip([None, *scope.body], scope.body, strict=False):
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name)
            ):
                pending.append((node.name, node))
            elif isinstance(node, ast.Expr) and is_text(node.value) and isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                yield ast.unparse(target), node.value


def is_public(name: str) -> bool:
    """Return whether a function is for others to call; a constructor is."""
    return name == "__init__" or not name.startswith("_")


def is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    """Return whether an expression is a string constant."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


if __name__ == "__main__":
    sys.exit(main())
