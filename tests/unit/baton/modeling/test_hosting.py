"""A worker's threads are on its cores before the model is loaded, so that they place its memory on their NUMA node. A
worker on a GPU says so if it does not use Triton's kernels."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from baton.modeling.hosting import prepare_kernels
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch
from baton.modeling import hosting
from baton.settings.place import WorkerPlace

def record(*args, **options):
    torch.randn(512, 512) @ torch.randn(512, 512)
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    print(len(threads) > 1, {core for thread in threads for core in os.sched_getaffinity(thread)})
    done.set()
    sys.exit()

done = threading.Event()
threading.Thread(target=done.wait).start()
hosting.load_decoder = record
hosting.LoadedModel().load(WorkerPlace(model_folder=Path("/none"), cores=(int(sys.argv[1]),), num_threads=4))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads")
def test_all_threads_are_bound_before_the_model_is_loaded() -> None:
    core = max(os.sched_getaffinity(0))
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(core)], check=True, capture_output=True, text=True)
    assert run.stdout.split(maxsplit=1) == ["True", f"{{{core}}}\n"]


def test_a_gpu_without_triton_s_kernels_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    decoder = random_decoder()
    decoder.weights = dataclasses.replace(decoder.weights, device=torch.device("cuda"))
    prepare_kernels(decoder)
    [record] = caplog.records
    assert "Triton" in record.getMessage() and "pip install" in record.getMessage()
