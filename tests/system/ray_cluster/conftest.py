"""Fixtures of tests on Ray: shared topologies, each of which is intact when a test receives it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from baton import Client
from tests.support.clusters.on_ray.ray_clusters import ServedCluster
from tests.support.clusters.on_ray.ray_heads import RayHead, driver_of
from tests.support.clusters.on_ray.topologies import SHAPE, GrownCluster, HostsCluster, make_topologies
from tests.support.clusters.on_ray.topology import Topology
from tests.support.models.letter_models import write_letter_model
from tests.support.models.tiny_tokenizer import write_chat_template


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of letters, with a chat template."""
    folder = write_letter_model(tmp_path_factory.mktemp("letters"), shape=SHAPE)
    write_chat_template(folder)
    return folder


@pytest.fixture(scope="session")
def topologies(
    letters: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Topology]]:
    """All topologies, by name. Those that still run end with the session."""

    def slow() -> Path:
        folder: Path = request.getfixturevalue("smollm2")  # only here: a bare machine with a GPU does not have it
        return folder

    made = make_topologies(letters, slow, tmp_path_factory.mktemp)
    yield made
    for topology in made.values():
        topology.close()


@pytest.fixture
def prepared(request: pytest.FixtureRequest, topologies: Mapping[str, Topology]) -> Iterator[None]:
    """The test's topologies run, and are whole. One that a passing test left otherwise, without a word, fails it; one
    that no further test needs ends."""
    needed = {name: topology for name, topology in topologies.items() if name in request.fixturenames}
    for topology in needed.values():
        topology.prepare()
    num_failed = request.session.testsfailed
    yield
    if request.session.testsfailed > num_failed:
        for topology in needed.values():
            topology.is_broken = True
    items = request.session.items
    further = {name for item in items[items.index(request.node) + 1 :] for name in getattr(item, "fixturenames", ())}
    for name, topology in needed.items():
        if not topology.is_broken:
            topology.check()
        if name not in further:
            topology.close()


@pytest.fixture
def one_host(topologies: Mapping[str, Topology], prepared: None) -> ServedCluster:
    """A chain of two ranks and two engines on a Ray of the cluster's own."""
    running: ServedCluster = topologies["one_host"].running
    return running


@pytest.fixture
def over_hosts(topologies: Mapping[str, Topology], prepared: None) -> HostsCluster:
    """A cluster over hosts in network namespaces."""
    running: HostsCluster = topologies["over_hosts"].running
    return running


@pytest.fixture
def grown(topologies: Mapping[str, Topology], prepared: None) -> GrownCluster:
    """A cluster on nodes that Ray's autoscaler starts."""
    running: GrownCluster = topologies["grown"].running
    return running


@pytest.fixture
def bare(topologies: Mapping[str, Topology], prepared: None) -> RayHead:
    """A Ray without a cluster."""
    running: RayHead = topologies["bare"].running
    return running


@pytest.fixture
def breaks(request: pytest.FixtureRequest, topologies: Mapping[str, Topology]) -> Callable[[], None]:
    """Called by a test that cannot restore its topologies: the next test gets them anew."""

    def breaking() -> None:
        for name in topologies.keys() & set(request.fixturenames):
            topologies[name].is_broken = True

    return breaking


@pytest.fixture
def joined(bare: RayHead) -> Iterator[None]:
    """This process is a driver of `bare`."""
    with driver_of(bare):
        yield


@pytest.fixture
def client(one_host: ServedCluster) -> Iterator[Client]:
    """A client of `one_host`."""
    with Client(one_host.target) as made:
        yield made
