"""Prometheus, Grafana and Tempo of the manifests: files that refer to each other, of the schemas of their readers."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import ROOT
from tests.support.manifests import DASHBOARDS, MANIFESTS, OBSERVABILITY, dashboard, documents, panels, queries
from tests.support.tools import find_command
from tests.unit.deploy.manifests.test_compose import complaints

pytestmark = pytest.mark.integration

PATH = MANIFESTS / "observability.yaml"
each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))


def services() -> dict[str, Any]:
    (compose,) = documents(PATH)
    found: dict[str, Any] = compose["services"]
    return found


def test_the_file_is_of_the_compose_specifications_schema() -> None:
    pytest.importorskip("check_jsonschema")
    assert complaints(PATH) == ""


def test_it_joins_the_cluster_of_the_other_file() -> None:
    (compose,), (cluster,) = documents(PATH), documents(MANIFESTS / "compose.yaml")
    assert compose["name"] == cluster["name"]
    assert {network for each in services().values() for network in each["networks"]} <= set(cluster["networks"])
    assert set(services()).isdisjoint(cluster["services"])
    scraped: Any = documents(OBSERVABILITY / "targets/cluster.yaml")
    (config,) = [line for line in (MANIFESTS / "cluster.toml").read_text().splitlines() if "metrics_port" in line]
    assert scraped == [[{"targets": [f"head:{config.split('=')[1].strip()}"]}]] and "head" in cluster["services"]


def test_every_file_that_a_container_gets_is_there() -> None:
    mounted = [each for service in services().values() for each in service["volumes"] if each["type"] == "bind"]
    assert len(mounted) == 7
    for each in mounted:
        source = re.sub(r"\$\{\w+:-(.*)\}", r"\1", each["source"])
        assert (MANIFESTS / source).exists(), source


def test_only_grafana_is_reached_from_outside_and_only_from_this_host() -> None:
    assert {name: each["ports"] for name, each in services().items() if "ports" in each} == {
        "grafana": ["127.0.0.1:3000:3000"]
    }


def test_images_have_versions() -> None:
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", each["image"]) for each in services().values())


def test_grafana_finds_sources_and_dashboards() -> None:
    (sources,) = documents(OBSERVABILITY / "grafana/datasources.yaml")
    by_type = {each["type"]: each["url"] for each in sources["datasources"]}
    (tempo,) = documents(OBSERVABILITY / "tempo.yaml")
    assert by_type == {
        "prometheus": "http://prometheus:9090",
        "tempo": f"http://tempo:{tempo['server']['http_listen_port']}",
    }
    (provided,) = documents(OBSERVABILITY / "grafana/dashboards.yaml")
    (provider,) = provided["providers"]
    targets = {each["target"] for each in services()["grafana"]["volumes"]}
    assert provider["options"]["path"] in targets
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in {each.name for each in DASHBOARDS} and str(Path(home).parent) in targets


def test_prometheus_takes_its_configuration_and_alerts() -> None:
    promtool = find_command("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "config", str(OBSERVABILITY / "prometheus.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "7 rules found" in ran.stdout, ran.stdout + ran.stderr


@each_dashboard
def test_a_dashboard_is_whole(path: Path) -> None:
    made = dashboard(path)
    assert made["uid"] == f"baton-{path.stem}" and made["title"].startswith("Baton: ")
    ids = [each["id"] for each in made["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {each["uid"] for each in sources} == {"${datasource}"}, panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references), panel["title"]


@each_dashboard
def test_no_panels_lie_on_each_other(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard(path)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]:
            assert cell not in taken, f"{panel['title']} lies on {taken.get(cell)}"
            taken[cell] = panel["title"]


def test_every_metric_of_the_documents_has_a_place_in_a_dashboard() -> None:
    shown = {family for path in DASHBOARDS for query in queries(path) for family in query.families}
    listed = {name.removesuffix("_total") for name in re.findall(r"^\| `(baton_\w+)`", METRICS_PAGE, re.MULTILINE)}
    listed |= {name.removesuffix("_total") for name in re.findall(r"`(baton_http_\w+)`", HTTP_PAGE)}
    assert listed - shown == set() and shown - listed == set()


METRICS_PAGE = (ROOT / "docs/metrics.md").read_text()
HTTP_PAGE = (ROOT / "docs/http.md").read_text()
