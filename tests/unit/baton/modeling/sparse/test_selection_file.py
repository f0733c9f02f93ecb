"""A prepared selection is read as it was written, and is refused for another model."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import PreparedSelection, load_prepared, prepared_path, save_prepared
from tests.support.models.tiny_models import random_decoder

REMEDY = "run `baton prepare` with this model, dtype and model.weights"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(num_layers=3)


def prepared_for(decoder: Decoder) -> PreparedSelection:
    shape = (3, 2, 16, 5)
    return PreparedSelection(
        basis=Basis(BasisKind.SKEW, torch.randn(shape), torch.randn(shape)),
        selection=Selection(alpha=math.inf, most_share=0.1, num_first=4, num_last=16, free_keys=32),
        lookahead=1,
        fingerprint=decoder.layout.model_fingerprint,
        text_hash="0123456789abcdef",
        captured_mass=0.9375,
        picked_share=0.05,
    )


@pytest.fixture
def path(decoder: Decoder, tmp_path: Path) -> Path:
    path = tmp_path / "new" / "file.safetensors"
    save_prepared(prepared_for(decoder), path)
    return path


@pytest.mark.parametrize("measured", [None, 0.0, 0.0123])
def test_everything_comes_back(decoder: Decoder, tmp_path: Path, measured: float | None) -> None:
    path = tmp_path / "file"
    saved = dataclasses.replace(prepared_for(decoder), perplexity_cost=measured, picked_share=measured)
    save_prepared(saved, path)
    loaded = load_prepared(path, decoder)
    assert dataclasses.replace(loaded, basis=saved.basis) == saved
    assert loaded.basis.kind is BasisKind.SKEW
    assert torch.equal(loaded.basis.q_LGHR, saved.basis.q_LGHR)
    assert torch.equal(loaded.basis.k_LGHR, saved.basis.k_LGHR)


def test_a_part_of_a_wider_basis_is_kept_as_it_is(decoder: Decoder, tmp_path: Path) -> None:
    prepared, path = prepared_for(decoder), tmp_path / "file"
    save_prepared(dataclasses.replace(prepared, basis=prepared.basis.first(2)), path)
    assert torch.equal(load_prepared(path, decoder).basis.k_LGHR, prepared.basis.k_LGHR[..., :2])


def test_a_newer_file_takes_the_older_one_s_place(decoder: Decoder, path: Path) -> None:
    save_prepared(dataclasses.replace(prepared_for(decoder), lookahead=0), path)
    assert load_prepared(path, decoder).lookahead == 0
    assert list(path.parent.iterdir()) == [path]


def test_each_model_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepared_path("abc") == tmp_path / "baton" / "selections" / "abc.safetensors"
    assert prepared_path("abc", lookahead=1) == tmp_path / "baton" / "selections" / "abc-early.safetensors"


def test_a_missing_selection_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no selection was prepared for this model: {REMEDY}"):
        load_prepared(tmp_path / "absent", decoder)


def test_another_model_s_file_is_refused(path: Path) -> None:
    other = random_decoder(num_layers=3, seed=1)
    with pytest.raises(ModelError, match=f"was prepared for model random-0.*, and this is random-1.*: {REMEDY}"):
        load_prepared(path, other)


def test_a_file_of_another_dtype_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="was prepared for model"):
        load_prepared(path, random_decoder(num_layers=3, dtype="bfloat16"))


@pytest.mark.parametrize("content", [b"", b"not tensors", bytes(1000)])
def test_what_is_no_such_file_is_refused(decoder: Decoder, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ModelError, match=f"is damaged.*: {REMEDY}"):
        load_prepared(tmp_path / "file", decoder)


def test_a_file_that_was_cut_short_is_refused(decoder: Decoder, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged"):
        load_prepared(path, decoder)


def test_other_tensors_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "file")
    with pytest.raises(ModelError, match="is not of format 'baton-selection 2'"):
        load_prepared(tmp_path / "file", decoder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "magic"}, "'magic' is not a valid BasisKind"),
        ({"alpha": "-1.0"}, "alpha = -1.0"),
        ({"num_last": "0"}, "num_last = 0"),
        ({"free_keys": "0"}, "free_keys = 0"),
        ({"lookahead": "2"}, "lookahead = 2"),
        ({"captured_mass": "nan"}, "captured_mass': nan"),
        ({"most_share": "much"}, "could not convert string to float"),
    ],
)
def test_a_field_that_cannot_be_is_refused(decoder: Decoder, path: Path, changes: dict[str, str], text: str) -> None:
    rewrite(path, changes)
    with pytest.raises(ModelError, match=text):
        load_prepared(path, decoder)


@pytest.mark.parametrize(
    "bad", [torch.zeros(3, 2, 16, 17), torch.zeros(3, 2, 8, 5), torch.full((3, 2, 16, 5), math.nan)]
)
def test_tensors_that_do_not_fit_are_refused(decoder: Decoder, path: Path, bad: torch.Tensor) -> None:
    rewrite(path, {}, {"q_LGHR": bad, "k_LGHR": bad.clone()})
    with pytest.raises(ModelError, match=r"is not finite, of float32 and shape \[3, 2, 16, 1 to 16\]"):
        load_prepared(path, decoder)


def test_no_room_is_said(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written .*; choose another file"):
        save_prepared(prepared_for(decoder), tmp_path / "file" / "below")


def rewrite(path: Path, changes: dict[str, str], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """The file again, with other fields or tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    save_file(tensors or load_file(path), path, metadata)
