"""Contents of `deploy/manifests`: documents, containers, their commands, and dashboards."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.folders import ROOT

MANIFESTS = ROOT / "deploy/manifests"
OBSERVABILITY = MANIFESTS / "observability"
DASHBOARDS = sorted((OBSERVABILITY / "dashboards").glob("*.json"))
METRIC = re.compile(r"\bbaton_[a-z_]+\b")
SERIES = re.compile(r"_(?:bucket|sum|count|total)$")
"""Suffixes that the name of a series has in addition to the name of its metric family."""
_COMMAND = re.compile(r"(?<![\w/.-])((?:baton|ray) [a-z].*)")
_END = re.compile(r"\s+(?:&&|\|\||;|\||&|#)(?:\s|$)|;")


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the YAML documents of a file, without empty ones."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def kubernetes_objects() -> list[dict[str, Any]]:
    """Return all objects of the files that the kustomization names."""
    (kustomization,) = documents(MANIFESTS / "kustomization.yaml")
    return [each for name in kustomization["resources"] for each in documents(MANIFESTS / name)]


def ray_cluster() -> dict[str, Any]:
    """Return the RayCluster object."""
    (found,) = [each for each in kubernetes_objects() if each["kind"] == "RayCluster"]
    return found


def pod_templates() -> dict[str, dict[str, Any]]:
    """Return the pod templates of all objects, by the name of the group or Deployment."""
    spec = ray_cluster()["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    deployments = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in kubernetes_objects()
        if each["kind"] == "Deployment"
    }
    return {"head": spec["headGroupSpec"]["template"], **groups, **deployments}


def commands(*, program: str) -> list[list[str]]:
    """Return the arguments of each command line of `program` (baton or ray) in all manifests, as a shell would pass
    them."""
    lines = [line for text in _texts() for line in text.splitlines()]
    found = [match[1] for line in lines if (match := _COMMAND.search(line))]
    split = [part for line in found for part in _parts(line)]
    return [shlex.split(part)[1:] for part in split if part.split()[0] == program]


@dataclass(frozen=True)
class Query:
    """An expression of a panel as Grafana would send it, with each variable set to match the most series."""

    panel: str
    expr: str

    @property
    def families(self) -> set[str]:
        """Return the metric families that the expression names."""
        return {SERIES.sub("", name) for name in METRIC.findall(self.expr)}


def dashboard(path: Path) -> dict[str, Any]:
    """Return a dashboard as written in its file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, without row titles."""
    return [each for each in dashboard(path)["panels"] if each["type"] != "row"]


def queries(path: Path, interval: str = "1m") -> Iterator[Query]:
    """Yield all queries of a dashboard, including those of its variables."""
    for panel in panels(path):
        for target in panel["targets"]:
            yield Query(panel["title"], filled(target["expr"], interval))
    for variable in dashboard(path)["templating"]["list"]:
        if variable["type"] == "query":
            values = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert values is not None, f"{path.name}: {variable['query']} is no label_values(METRIC, LABEL)"
            yield Query(f"variable {variable['name']}", f"count by ({values[2]}) ({values[1]})")


def filled(expr: str, interval: str) -> str:
    """Return an expression in which Grafana's variables are replaced by values."""
    values = {"$__rate_interval": interval, "$group": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"{expr}: a variable that no test knows"
    return expr


def _parts(line: str) -> Iterator[str]:
    """Yield the `baton` and `ray` commands in a line. Commands may be separated by `&&`, `;` and similar operators."""
    for part in _END.split(line):
        if match := _COMMAND.search(part):
            yield match[1]


def _texts() -> Iterator[str]:
    """Yield everything that a shell or the kernel executes: each YAML string as one line, and each list of words joined
    to a line."""
    paths = [*MANIFESTS.rglob("*.yaml")]
    yield from (text for path in paths for document in documents(path) for text in _strings(document))


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node.replace("$$", "$")
    elif isinstance(node, dict):
        for value in node.values():
            yield from _strings(value)
    elif isinstance(node, list):
        words = [each for each in node if isinstance(each, str)]
        if words and words[0] in ("CMD", "baton", "ray"):
            yield shlex.join(words[words[0] == "CMD" :])
        else:
            for each in node:
                yield from _strings(each)
