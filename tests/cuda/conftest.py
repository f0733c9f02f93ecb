"""Devices of the tests in this folder: a GPU, or devices that stand for one.

BATON_TEST_DEVICE chooses `cuda` or `emulated`; by default a GPU where torch sees one.

Nothing here, and nothing imported from here, needs ray, grpc or deploy: tests/architecture/test_bare_machine.py.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.device.port import Device
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from tests.support.engines.devices import STANDING_FOR_A_GPU, device_for_tests
from tests.support.models.tiny_models import random_decoder

ON_GPU = os.environ.setdefault("BATON_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "emulated") == "cuda"
NAMES = ["cuda"] if ON_GPU else list(STANDING_FOR_A_GPU)
NO_GPU = "torch sees no GPU here: set BATON_TEST_DEVICE=emulated to run these tests without one"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    if not ON_GPU and item.get_closest_marker("gpu"):
        pytest.skip("needs a GPU")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each test's outcome, one JSON object a line, in the file that BATON_TEST_JSON names."""
    path = os.environ.get("BATON_TEST_JSON")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:  # xdist's own process tells of its workers' tests
        return
    if report.when == "call" or report.outcome != "passed":
        row = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose memory shows NaN until it is written."""
    if not ON_GPU:
        torch.set_num_threads(1)
    made = device_for_tests(request.param)
    yield made
    made.link.rest()


@pytest.fixture
def make(device: Device) -> Callable[..., Decoder]:
    """A function that makes random decoders on the device, by the arguments of `random_decoder`."""
    kernel = plain_kernel if device.name == "cuda" else None  # a GPU's own, also where a CPU stands for one

    def made(**shape: Any) -> Decoder:
        return random_decoder(device=device, kernel=kernel, **shape)

    return made
