"""What `deploy/manifests` holds, for tests: documents, containers, the commands in them, and dashboards."""

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
"""What the name of a series has beyond that of its family."""
_COMMAND = re.compile(r"(?<![\w/.-])((?:baton|ray) [a-z].*)")
_END = re.compile(r"\s+(?:&&|\|\||;|\||&|#)(?:\s|$)|;")


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file, comments and empty ones left out."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def kubernetes_objects() -> list[dict[str, Any]]:
    """All objects of the files that the kustomization names."""
    (kustomization,) = documents(MANIFESTS / "kustomization.yaml")
    return [each for name in kustomization["resources"] for each in documents(MANIFESTS / name)]


def ray_cluster() -> dict[str, Any]:
    """The RayCluster."""
    (found,) = [each for each in kubernetes_objects() if each["kind"] == "RayCluster"]
    return found


def pod_templates() -> dict[str, dict[str, Any]]:
    """The pod templates of all objects, by the name of the group or Deployment."""
    spec = ray_cluster()["spec"]
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    deployments = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in kubernetes_objects()
        if each["kind"] == "Deployment"
    }
    return {"head": spec["headGroupSpec"]["template"], **groups, **deployments}


def commands(*, program: str) -> list[list[str]]:
    """The arguments of each command line of `program` (baton or ray) in any of the manifests, as a shell would pass
    them."""
    lines = [line for text in _texts() for line in text.splitlines()]
    found = [match[1] for line in lines if (match := _COMMAND.search(line))]
    split = [part for line in found for part in _parts(line)]
    return [shlex.split(part)[1:] for part in split if part.split()[0] == program]


@dataclass(frozen=True)
class Query:
    """One expression of a panel, as Grafana would send it, with each variable at its widest."""

    panel: str
    expr: str

    @property
    def families(self) -> set[str]:
        """The metric families that it names."""
        return {SERIES.sub("", name) for name in METRIC.findall(self.expr)}


def dashboard(path: Path) -> dict[str, Any]:
    """A dashboard as it is written."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, without the titles of rows."""
    return [each for each in dashboard(path)["panels"] if each["type"] != "row"]


def queries(path: Path, interval: str = "1m") -> Iterator[Query]:
    """What a dashboard asks, its variables included."""
    for panel in panels(path):
        for target in panel["targets"]:
            yield Query(panel["title"], filled(target["expr"], interval))
    for variable in dashboard(path)["templating"]["list"]:
        if variable["type"] == "query":
            values = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert values is not None, f"{path.name}: {variable['query']} is no label_values(METRIC, LABEL)"
            yield Query(f"variable {variable['name']}", f"count by ({values[2]}) ({values[1]})")


def filled(expr: str, interval: str) -> str:
    """An expression with the values of Grafana's variables."""
    values = {"$__rate_interval": interval, "$group": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"{expr}: a variable that no test knows"
    return expr


def _parts(line: str) -> Iterator[str]:
    """The commands of `baton` and `ray` in a line, in which `&&`, `;` and the like may separate several."""
    for part in _END.split(line):
        if match := _COMMAND.search(part):
            yield match[1]


def _texts() -> Iterator[str]:
    """What a shell or the kernel gets to run: strings of YAML as one line each, and lists of words joined."""
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
