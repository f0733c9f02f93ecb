"""The collector's settings, tried in a process of their own: they go for all of it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import gc
from baton.process.garbage import collect_rarely

class Knot:
    def __init__(self):
        self.self = self

kept, num_collections = [Knot() for _ in range(1000)], []
collect_rarely()
gc.callbacks.append(lambda phase, info: num_collections.append(phase))
for _ in range(40_000):
    Knot()
print(gc.get_freeze_count() >= 1000, len(num_collections), gc.collect() >= 40_000)
"""


def test_what_serves_is_not_looked_at_and_knots_still_go() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], text=True, capture_output=True, check=True)
    assert run.stdout.split() == ["True", "0", "True"]
