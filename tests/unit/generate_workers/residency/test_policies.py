"""Policies that pick keys a layer early go by a selection that was tuned so, where there is one."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import PreparedSelection, prepared_path, save_prepared
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import KvShape
from tests.support.engines.devices import on_emulated
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

DECODER = random_decoder()
LAYOUT = DECODER.layout
FINGERPRINT = LAYOUT.model_fingerprint
BASIS = Basis(BasisKind.SKEW, *torch.randn(2, LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, 5))
OWN = PreparedSelection(BASIS, Selection(math.inf, 0.1, 4, 16), 0, FINGERPRINT, "text")
EARLY = dataclasses.replace(OWN, lookahead=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep(*prepared: PreparedSelection) -> None:
    for each in prepared:
        save_prepared(each, prepared_path(FINGERPRINT, each.lookahead))


def test_each_has_its_own_file() -> None:
    keep(OWN, EARLY)
    source = SelectionSource(DECODER)
    assert (source.load().lookahead, source.load_early().lookahead) == (0, 1)


def test_one_that_was_tuned_otherwise_is_used_and_told(caplog: pytest.LogCaptureFixture) -> None:
    keep(OWN)
    assert SelectionSource(DECODER).load_early().lookahead == 0
    assert "run `baton prepare --lookahead 1`" in caplog.text


def test_a_named_file_is_taken(tmp_path: Path) -> None:
    keep(EARLY)
    save_prepared(OWN, tmp_path / "named")
    assert SelectionSource(DECODER, tmp_path / "named").load_early().lookahead == 0


def test_the_early_one_alone_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    keep(EARLY)
    assert SelectionSource(DECODER).load_early().lookahead == 1 and not caplog.text
    with pytest.raises(ModelError, match="run `baton prepare`"):
        SelectionSource(DECODER).load()


@needs_rows
def test_a_policy_that_only_the_cpu_serves_is_refused_on_another_device() -> None:
    decoder = on_emulated(DECODER)
    shape = KvShape(decoder.layout, decoder.config.windows, 1, 64)
    with pytest.raises(ConfigError, match="'infinigen_int4' needs device cpu: use residency infinigen on emulated"):
        make_residency("infinigen_int4", shape, decoder.device, SelectionSource(decoder))
