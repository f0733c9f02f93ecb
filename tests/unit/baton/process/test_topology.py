"""NUMA nodes and cores are read from sysfs; where it lacks, a machine is one node of cores with one thread each."""

import os
from pathlib import Path

import pytest

from baton.process.topology import NumaNode, computing_cpus, node_of, read_nodes, usable_cpus
from tests.support.sysfs import Shape, flat_nodes

GIB = 2**30


def test_nodes_have_their_cores_hardware_threads_and_free_memory(tmp_path: Path) -> None:
    nodes = Shape(2, 2, 2).nodes(tmp_path)
    assert nodes == (NumaNode(0, ((0, 4), (1, 5)), 64 * GIB), NumaNode(1, ((2, 6), (3, 7)), 64 * GIB))
    assert [sorted(node.cpus) for node in nodes] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert computing_cpus(nodes) == [(0, 1), (2, 3)]


def test_only_usable_cpus_count(tmp_path: Path) -> None:
    system = Shape(4, 4, 2).write(tmp_path)
    nodes = read_nodes({1, 5, 6, 7, 22, 23}, system)
    assert [(node.number, node.cores) for node in nodes] == [(0, ((1,),)), (1, ((5,), (6, 22), (7, 23)))]
    assert read_nodes(None, system) == read_nodes(range(32), system)


@pytest.mark.parametrize("num_cpus", [1, 4, 9])
def test_without_sysfs_all_cpus_are_cores_of_one_node(num_cpus: int) -> None:
    (node,) = flat_nodes(num_cpus)
    assert node == NumaNode(0, tuple((cpu,) for cpu in range(num_cpus)))
    assert computing_cpus([node]) == [tuple(range(num_cpus))]


def test_cpus_that_no_node_lists_are_one_node_with_the_others(tmp_path: Path) -> None:
    (node,) = read_nodes({0, 7}, Shape(2, 2).write(tmp_path))
    assert node == NumaNode(0, ((0,), (7,)))


def test_of_few_cpus_all_compute(tmp_path: Path) -> None:
    assert computing_cpus(Shape(1, 2, 2).nodes(tmp_path / "few")) == [(0, 1, 2, 3)]
    assert computing_cpus(Shape(1, 3, 2).nodes(tmp_path / "more")) == [(0, 1, 2)]


def test_cpus_are_on_a_node_if_it_has_all_of_them(tmp_path: Path) -> None:
    nodes = Shape(2, 4).nodes(tmp_path)
    assert [node_of(cpus, nodes) for cpus in ({0}, {4, 7}, {3, 4}, set(range(8)))] == [0, 1, None, None]
    assert node_of({0}, nodes[:1]) is None, "a machine with one node needs no name for it"


def test_this_machine_has_the_cpus_on_which_this_process_may_run() -> None:
    nodes = read_nodes(usable_cpus())
    assert set().union(*(node.cpus for node in nodes)) == usable_cpus()
    assert len(usable_cpus()) <= (os.cpu_count() or 1)
    assert node_of(usable_cpus(), read_nodes()) in (None, *(node.number for node in nodes))
