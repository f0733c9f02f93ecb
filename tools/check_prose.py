"""Finds wording that violates the house style in docstrings, comments, help texts, messages, metrics and documents.

PATTERNS lists the refused wordings, the kinds of text in which they are refused, and the wording to use instead.
`tools/prose_baseline.tsv` has the number of hits of each pattern that each file still has. The check fails if a file
has more hits than its baseline. It also fails if a file has fewer, until `--update-baseline` has lowered the count.
`--update-baseline` never raises a count and never adds a file. It follows files that git recognizes as renamed. Code in
backticks and fences is ignored. `--sample N` prints N random docstrings for people to read.
"""

import argparse
import ast
import random
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

FOLDERS = (
    "baton",
    "orchestrator",
    "prefill_workers",
    "generate_workers",
    "gateway",
    "deploy",
    "baton_lab",
    "benchmarks",
    "tools",
)
DOCUMENTS = ("README.md", "DESIGN.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
GENERATED = "baton/v1"
BASELINE = Path("tools/prose_baseline.tsv")
HEADER = "file\tpattern\tcount"
LEAST_WORDS = 4

SCOPES = ("docstring", "comment", "help", "error", "log", "metric", "string", "document")
"""Kinds of text. A "string" is any string of at least LEAST_WORDS words that is of no other kind. Such strings are
checked because they may be passed to exceptions as messages."""
ALONE = ("docstring", "help", "metric")
"""Kinds of text that must begin with a capitalised subject or verb, because readers see each such text alone."""


@dataclass(frozen=True)
class Pattern:
    """Refused wording, with the wording to use instead. The regular expression ignores case. A space in it matches a
    space or a line break."""

    name: str
    regex: str
    suggestion: str
    scopes: tuple[str, ...] = SCOPES


FEW_WORDS = Pattern("few-words", "", f"use at least {LEAST_WORDS} words", ("docstring",))
"""Pattern for public docstrings that are too short. It has no regular expression, because words are counted instead."""
PATTERNS = (
    Pattern(
        "start", r"\A(?:what|whether|of|that|as|and|or|likewise)\b", "start with a verb or with the noun itself", ALONE
    ),
    Pattern("what", r"(?:\A|(?<=[.;:]\s))What\b(?![^.?!]*\?)", "name the thing", ("comment", "document")),
    Pattern(
        "there",
        r"\b(?:is|are|was|were|be|been) (?:not |already |still |no longer )?there\b",
        "exists / is supported / is installed / is ready / is running",
    ),
    Pattern("there-is", r"\b(?:that|which|than|as) there (?:is|are|was|were)\b", "existing / available / unknown"),
    Pattern("there-to-be", r"\bthere to be\b", "desired / required"),
    Pattern(
        "is-no",
        r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|better\b|worse\b|later\b|\w+er than\b)",
        "is not a / expected X / is not supported",
    ),
    Pattern("had", r"\b(?:be|is|are|was|were|been) had\b", "allocated / downloaded / bound / available"),
    Pattern("beside", r"\bbesides?\b", "next to / compared with / in addition to / also"),
    Pattern("nobody", r"\b(?:whoever|whomever|whom|nobody|somebody)\b", "name the user, process or component"),
    Pattern("whatever", r"\bwhatever\b", "any / regardless of"),
    Pattern("but-for", r"\bbut for\b", "except"),
    Pattern("nothing-but", r"\b(?:none|nothing|anything|no other) but\b", "only"),
    Pattern("all-the-same", r"(?<!are )\ball the same\b", "anyway"),
    Pattern("anew", r"\banew\b", "again"),
    Pattern("likewise", r"\blikewise\b", "also, or repeat the noun"),
    Pattern(
        "archaic",
        r"\b(?:hitherto|thereof|therein|thereupon|whereupon|wherein|whence|thence|lest|whilst|amongst|upon|withal)\b",
        "the everyday word",
    ),
    Pattern("so-many", r"\bso many\b", "name the number: `num_x` or N"),
    Pattern(
        "as-many",
        r"(?<!twice )(?<!times )(?<!half )\bas many\b(?! as\b)(?!(?: [\w`-]+){1,4} as\b)",
        "the same number of / N",
    ),
    Pattern("comes-to", r"\b(?:comes?|came) to\b", "is / totals / reaches"),
    Pattern("for-others", r"\b(?:is|are) for (?:others?|another)\b", "name who does it"),
    Pattern("tell", r"\b(?:tells?|told|telling)\b", "notify / report / show / distinguish"),
    Pattern("ask", r"\b(?:asks?|asked|asking)\b(?! for\b)", "request / query / call"),
    Pattern("home", r"(?-i:\b[Hh]omes?\b)(?! (?:directory|folder|page))", "host memory"),
    Pattern("lies", r"\b(?:lives|lies|lie|lay)\b(?! (?:between|within|outside)\b)", "is stored in / is in / runs in"),
    Pattern("life", r"(?<!sign of )(?<!signs of )\blife\b(?! cycle)", "lifetime / incarnation"),
    Pattern("goes-on", r"\b(?:goes|go|went|going) on\b", "continues"),
    Pattern("in-turn", r"\b(?:in|by|takes?|taking) turns?\b", "one after another / alternate"),
    Pattern("on-from", r"\bfrom (?:which|then|there|here) on\b", "starting at / after that"),
    Pattern("give-back", r"\b(?:gives?|gave|given|giving) (?:it |them )?back\b", "release / return"),
    Pattern("let-go", r"\blets? go\b", "release"),
    Pattern("wish", r"\bwish(?:es|ed)?\b", "request / option"),
    Pattern("seat", r"\bseats?\b", "slot"),
    Pattern("known-of", r"\b(?:known|says?|said|speaks?) of\b", "state of / reported by"),
    Pattern("in-words", r"\bin words\b", "as readable text"),
    Pattern("another-try", r"\banother try\b", "retrying"),
    Pattern("the-like", r"\bthe like\b", "name the others"),
    Pattern("need-be", r"\bif need be\b|\bneed not\b", "if needed / does not need to"),
    Pattern("semicolons", r";[^.;]+;", "split the sentence", ("docstring", "comment", "error", "log")),
)
MATCHERS = [(each, re.compile(each.regex.replace(" ", r"\s"), re.IGNORECASE)) for each in PATTERNS]
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)
_FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)


class Text(NamedTuple):
    """Text to check, with its kind and the line on which it begins."""

    scope: str
    line: int
    text: str


class Hit(NamedTuple):
    """Match of a pattern in a file, with its line and its kind of text."""

    file: str
    line: int
    scope: str
    pattern: Pattern
    found: str

    def __str__(self) -> str:
        """Return `file:line scope pattern: found -> suggestion`."""
        return f"{self.file}:{self.line} {self.scope} {self.pattern.name}: {self.found!r} -> {self.pattern.suggestion}"


Counts = dict[tuple[str, str], int]
"""Number of hits, by file and name of the pattern."""


class Docstring(NamedTuple):
    """Docstring of a module, class or public function, or string below a field or constant. `owner_line` is the line on
    which the documented object begins."""

    name: str
    owner_line: int
    node: ast.Constant


def hits_in(root: Path) -> Iterator[Hit]:
    """Yield the matches of all patterns in the Python files and documents of the checkout at `root`, file by file."""
    for path in python_files(root):
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        yield from hits(name, [*strings(tree, "metric" if is_about_metrics(name) else "string"), *comments(source)])
        for docstring in docstrings(tree):
            text = str(docstring.node.value)
            if len(re.findall(r"[\w'`./-]+", text)) < LEAST_WORDS:
                yield Hit(name, docstring.node.lineno, "docstring", FEW_WORDS, text)
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            text = _FENCED.sub(blank, path.read_text(encoding="utf-8"))
            yield from hits(path.relative_to(root).as_posix(), [Text("document", 1, text)])


def python_files(root: Path) -> list[Path]:
    """Return the sorted paths of all Python files to check. Generated stubs and tests are left out."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [path for path in paths if not path.is_relative_to(root / GENERATED)]


def is_about_metrics(name: str) -> bool:
    """Return True if most strings of the file with this name are help texts of metrics."""
    return name.startswith("orchestrator/observability/") and "metrics" in Path(name).name


def hits(file: str, texts: list[Text]) -> Iterator[Hit]:
    """Yield the matches of all patterns in the texts of a file. Code in backticks is ignored."""
    for scope, line, text in texts:
        prose = _CODE.sub(blank, re.sub(r"[ \t]*\n[ \t]*", "\n", text))
        for pattern, matcher in MATCHERS:
            if scope in pattern.scopes:
                for match in matcher.finditer(prose):
                    found = " ".join(match[0].split())
                    yield Hit(file, line + prose.count("\n", 0, match.start()), scope, pattern, found)


def blank(match: re.Match[str]) -> str:
    """Return a replacement for a piece of code: a bullet character, followed by as many line breaks as the code has."""
    return "\N{BULLET}" + "\n" * match[0].count("\n")


def strings(tree: ast.Module, rest: str) -> Iterator[Text]:
    """Yield the docstrings and other strings of a module, each with its kind of text. If a string is an argument of a
    call, the call may determine its kind: for example, an argument of a logger's method is a log message. `rest` is the
    kind of all other strings."""
    pending: list[tuple[ast.AST, str]] = [(tree, rest)]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.Expr) and is_text(node.value):
            yield Text("docstring", node.lineno, str(node.value.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [str(each.value) if isinstance(each, ast.Constant) else "\N{BULLET}" for each in node.values]
            yield from as_prose(Text(scope, node.lineno, "".join(parts)), rest)
            pending += [(each, scope) for each in node.values if isinstance(each, ast.FormattedValue)]
        elif isinstance(node, ast.Constant):
            if is_text(node):
                yield from as_prose(Text(scope, node.lineno, str(node.value)), rest)
        elif isinstance(node, ast.keyword):
            is_help = node.arg in ("help", "description", "epilog", "usage", "metavar")
            pending.append((node.value, "help" if is_help else scope))
        else:
            inner = scope_of(node.func, scope) if isinstance(node, ast.Call) else scope
            pending += [(child, inner) for child in ast.iter_child_nodes(node)]


def as_prose(text: Text, rest: str) -> list[Text]:
    """Return a list with the text, or an empty list if the text is not checked. `rest`: kind of text that is checked
    only if it has at least LEAST_WORDS words."""
    return [] if text.scope == rest and len(text.text.split()) < LEAST_WORDS else [text]


def scope_of(function: ast.expr, outer: str) -> str:
    """Return the kind of the strings that are arguments of a call of `function`. It is "error" for an exception or a
    parser's error, and "log" for a logger. Otherwise it is `outer`, the kind of the surrounding call."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Attribute) and "log" in ast.unparse(function.value).lower().split(".")[-1]:
        return "log"
    return "error" if name.endswith(("Error", "Exception")) or name in ("error", "SystemExit") else outer


def comments(source: str) -> Iterator[Text]:
    """Yield the comments in a source text. Comments on consecutive lines that start in the same column are one
    comment."""
    block: list[tuple[tuple[int, int], str]] = []
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            if block and token.start != (block[-1][0][0] + 1, block[-1][0][1]):
                yield Text("comment", block[0][0][0], "\n".join(text for _, text in block))
                block = []
            block.append((token.start, token.string.lstrip("#! ")))
    if block:
        yield Text("comment", block[0][0][0], "\n".join(text for _, text in block))


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    """Yield the docstrings of a module, of its classes and public functions, and of its fields and constants (the
    strings below them)."""
    pending: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [("module", tree)]
    while pending:
        name, scope = pending.pop()
        first = scope.body[0] if scope.body else None
        if isinstance(first, ast.Expr) and is_text(first.value):
            yield Docstring(name, getattr(scope, "lineno", first.lineno), first.value)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and name != "__init__":
            continue
        for before, node in zip([None, *scope.body], scope.body, strict=False):
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and (node.name == "__init__" or not node.name.startswith("_"))
            ):
                pending.append((node.name, node))
            elif isinstance(node, ast.Expr) and is_text(node.value) and isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                yield Docstring(ast.unparse(target), before.lineno, node.value)


def is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    """Return True if an expression is a string constant."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def count(found: list[Hit]) -> Counts:
    """Return the number of hits, by file and name of the pattern."""
    return Counter((hit.file, hit.pattern.name) for hit in found)


def read_baseline(path: Path) -> Counts:
    """Read the counts of a baseline from a file. Return no counts if the file does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {(file, name): int(number) for file, name, number in (line.split("\t") for line in lines)}


def write_baseline(path: Path, counts: Counts) -> None:
    """Write the counts of a baseline to a file, sorted by file and pattern."""
    lines = [f"{file}\t{name}\t{number}" for (file, name), number in sorted(counts.items())]
    path.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")


def shrunk(baseline: Counts, counts: Counts, renamed: dict[str, str]) -> Counts:
    """Return a copy of `baseline` in which renamed files have their new names, and in which no count is higher than the
    current count in `counts`."""
    moved: Counter[tuple[str, str]] = Counter()
    for (file, name), number in baseline.items():
        moved[renamed.get(file, file), name] += number
    lowered = {key: min(number, counts.get(key, 0)) for key, number in moved.items()}
    return {key: number for key, number in lowered.items() if number}


def renames(root: Path) -> dict[str, str]:
    """Return the files that have been renamed since the baseline was last committed: the new names, by old name."""
    since = git(root, "log", "-1", "--format=%H", "--", str(BASELINE)).strip()
    lines = git(root, "diff", "--name-status", "-M", "--diff-filter=R", since).splitlines() if since else []
    return {old: new for _, old, new in (line.split("\t") for line in lines)}


def git(root: Path, *arguments: str) -> str:
    """Run a git command in the checkout at `root`, and return its output. Raises CalledProcessError if the command
    fails."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def complaints(found: list[Hit], baseline: Counts) -> list[str]:
    """Return one line for each hit in a file that has more hits than its baseline allows. Also return one line for each
    count of the baseline that must be lowered, because the file has fewer hits."""
    counts = count(found)
    keys = [(hit, (hit.file, hit.pattern.name)) for hit in found]
    return [str(hit) for hit, key in keys if counts[key] > baseline.get(key, 0)] + [
        f"{file} {name}: {counts.get((file, name), 0)} hits, {number} in the baseline: run --update-baseline"
        for (file, name), number in baseline.items()
        if counts.get((file, name), 0) < number
    ]


def sample(root: Path, number: int) -> Iterator[str]:
    """Yield `number` randomly selected docstrings, each with its location and its signature. The seed is the id of the
    commit HEAD, so the selection is the same for the same commit."""
    places = [(path, each) for path in python_files(root) for each in docstrings(ast.parse(path.read_text("utf-8")))]
    seed = int(git(root, "rev-parse", "HEAD")[:8], 16)
    for path, (name, owner_line, node) in random.Random(seed).sample(places, min(number, len(places))):
        owner = path.read_text("utf-8").splitlines()[owner_line - 1 : node.lineno - 1]
        yield "\n".join([f"{path.relative_to(root)}:{node.lineno} {name}", *owner, "    " + str(node.value), ""])


def main() -> int:
    """Run what the command line selects. Return 1 if the check prints any hits or other complaints, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--update-baseline", action="store_true", help="lower the counts of the baseline to today's")
    modes.add_argument("--create", action="store_true", help="write the first baseline")
    modes.add_argument("--list", action="store_true", help="print all hits, the baseline's included")
    modes.add_argument("--sample", type=int, metavar="N", help="number of random docstrings to print for a reader")
    options = parser.parse_args()
    root = Path.cwd()
    if options.sample:
        print(*sample(root, options.sample), sep="\n")
        return 0
    found, baseline = list(hits_in(root)), read_baseline(root / BASELINE)
    if options.create:
        if baseline:
            parser.error(f"{BASELINE} exists: use --update-baseline")
        write_baseline(root / BASELINE, baseline := count(found))
    elif options.update_baseline:
        write_baseline(root / BASELINE, baseline := shrunk(baseline, count(found), renames(root)))
    refused = list(map(str, found)) if options.list else complaints(found, baseline)
    print(*refused, f"prose: {len(refused)} refused, {sum(baseline.values())} in the baseline", sep="\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
