"""Safetensors file with the results of `baton prepare` for one model: the basis (low-rank
projections of queries and keys) and the parameters of key selection.

Residency policies that select keys load the file when a generation group starts. Its tensors are `q_LGHR` and `k_LGHR`
(see `baton.modeling.sparse.bases`). All other values are text in the file's metadata. A file is valid only for the
weights from which it was computed, including their dtype and form. It stores the fingerprint of these weights.
Reading and writing block on the disk.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.process.whole_files import whole
from baton.settings.paths import cache_folder

_FORMAT = "baton-selection 2"
"""Name of the file format, with the version of its fields."""
_REMEDY = "run `baton prepare` with this model, dtype and model.weights"
_TENSORS = ("q_LGHR", "k_LGHR")
_MEASURED = ("captured_mass", "picked_share", "perplexity_cost")
LOOKAHEADS = (0, 1)


@dataclass(frozen=True)
class PreparedSelection:
    """Results of `baton prepare` for one model. Residency policies use them to select keys."""

    basis: Basis
    selection: Selection
    lookahead: int
    """Number of layers by which keys are selected early. 0: a layer's keys are selected by its own queries. 1: they are
    selected by queries that are predicted from the previous layer's input."""
    fingerprint: str
    """Fingerprint of the model's weights (`KvLayout.model_fingerprint`)."""
    text_hash: str
    """Hash of the sample text from which `basis` was computed."""
    captured_mass: float | None = None
    """Fraction (0 to 1) of the attention weight that the selected keys have after softmax. It is measured on text
    that was not used to compute `basis`. None: not measured."""
    picked_share: float | None = None
    """Fraction (0 to 1) of a sequence's keys that are selected. It is measured on text that was not used to
    compute `basis`. None: not measured."""
    perplexity_cost: float | None = None
    """Relative increase of perplexity caused by key selection, compared with attention to all keys. It is measured on
    text that was not used to compute `basis`. None: not measured."""


def prepared_path(fingerprint: str, lookahead: int = 0) -> Path:
    """Return the path of the selection file for the model with this fingerprint. `baton prepare` writes the file and
    workers read it. The path is different for a nonzero `lookahead` (see PreparedSelection)."""
    early = "-early" if lookahead else ""
    return cache_folder() / "selections" / f"{fingerprint}{early}.safetensors"


def save_prepared(prepared: PreparedSelection, path: Path) -> None:
    """Write `prepared` to the file `path`, which is replaced atomically if it exists. Raises ConfigError if the file
    cannot be written."""
    selection = prepared.selection
    metadata = {
        "format": _FORMAT,
        "fingerprint": prepared.fingerprint,
        "kind": prepared.basis.kind.value,
        "text_hash": prepared.text_hash,
        "alpha": repr(float(selection.alpha)),
        "most_share": repr(float(selection.most_share)),
        "num_first": str(selection.num_first),
        "num_last": str(selection.num_last),
        "free_keys": str(selection.free_keys),
        "lookahead": str(prepared.lookahead),
    }
    for name in _MEASURED:
        if (value := getattr(prepared, name)) is not None:
            metadata[name] = repr(float(value))
    basis = prepared.basis  # copied, because safetensors refuses tensors that share memory or have gaps
    tensors = {name: getattr(basis, name).clone(memory_format=torch.contiguous_format) for name in _TENSORS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            save_file(tensors, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be written ({error}); choose another file") from error


def load_prepared(path: Path, decoder: Decoder) -> PreparedSelection:
    """Read a file that `save_prepared` has written. Raises ModelError if the file does not exist, is damaged, or
    belongs to another model."""
    if not path.is_file():
        raise ModelError(f"{path}: no selection was prepared for this model: {_REMEDY}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_origin(path, metadata, decoder)
            q_LGHR, k_LGHR = map(file.get_tensor, _TENSORS)
            basis = _basis(path, metadata["kind"], q_LGHR, k_LGHR, decoder)
        return _prepared(basis, metadata)
    except (SafetensorError, OSError, KeyError, ValueError, ConfigError) as error:
        raise ModelError(f"{path}: is damaged ({error}): {_REMEDY}") from error


def _check_origin(path: Path, metadata: dict[str, str], decoder: Decoder) -> None:
    if metadata.get("format") != _FORMAT:
        raise ModelError(f"{path}: is not of format {_FORMAT!r}: {_REMEDY}")
    found, expected = metadata.get("fingerprint"), decoder.layout.model_fingerprint
    if found != expected:
        raise ModelError(f"{path}: was prepared for model {found}, and this is {expected}: {_REMEDY}")


def _basis(path: Path, kind: str, q_LGHR: Tensor, k_LGHR: Tensor, decoder: Decoder) -> Basis:
    layout = decoder.layout
    outer = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
    for name, tensor in zip(_TENSORS, (q_LGHR, k_LGHR), strict=True):
        fits = tensor.dim() == 4 and tensor.shape == q_LGHR.shape and tensor.shape[:3] == outer
        fits = fits and 1 <= tensor.shape[3] <= layout.head_dim
        if not fits or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            shape = f"[{', '.join(map(str, outer))}, 1 to {layout.head_dim}]"
            raise ModelError(f"{path}: {name} is not finite, of float32 and shape {shape}: {_REMEDY}")
    return Basis(BasisKind(kind), q_LGHR, k_LGHR)


def _prepared(basis: Basis, metadata: dict[str, str]) -> PreparedSelection:
    """Build the selection from the metadata. Raises KeyError, ValueError or ConfigError for a missing or bad field."""
    lookahead = int(metadata["lookahead"])
    measured = {name: float(metadata[name]) for name in _MEASURED if name in metadata}
    if lookahead not in LOOKAHEADS or not all(map(math.isfinite, measured.values())):
        raise ValueError(f"lookahead = {lookahead}, {measured}")
    return PreparedSelection(
        basis=basis,
        selection=Selection(
            alpha=float(metadata["alpha"]),
            most_share=float(metadata["most_share"]),
            num_first=int(metadata["num_first"]),
            num_last=int(metadata["num_last"]),
            free_keys=int(metadata["free_keys"]),
        ),
        lookahead=lookahead,
        fingerprint=metadata["fingerprint"],
        text_hash=metadata["text_hash"],
        **measured,
    )
