"""Which folders an operator may name for a group's model: those of models, links followed; nothing else is opened."""

import contextlib
from pathlib import Path
from typing import cast

import pytest

from baton.calls.cluster_state import GroupState
from baton.errors import InvalidArgumentError, NotFoundError
from baton.v1 import admin_pb2 as pb
from orchestrator.actuation.operations import GroupOperations
from orchestrator.api.admin import AdminServicer, Context
from orchestrator.observability.traces import Traces

CONTEXT = cast(Context, None)


class Asked:
    """Hears what was let through."""

    def __init__(self) -> None:
        self.models: list[str] = []

    async def undrain(self, name: str, model: str = "") -> GroupState:
        self.models.append(model)
        raise NotFoundError(f"{name} is not here")


async def ask(folders: tuple[Path, ...] | None, model: str) -> list[str]:
    """What of the call reaches the cluster."""
    asked = Asked()
    servicer = AdminServicer(cast(GroupOperations, asked), Traces(), folders)
    with contextlib.suppress(NotFoundError):
        await servicer.Undrain(pb.UndrainRequest(group="generate-0", model=model), CONTEXT)
    return asked.models


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models" / "way-out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "models" / "circle").symlink_to(tmp_path / "models" / "circle")
    return tmp_path / "models"


async def test_a_model_below_a_folder_of_models_is_let_through(models: Path) -> None:
    for model in (models, models / "good", models / "good" / "snapshots" / "1", models / "not-there-yet"):
        assert await ask((Path("/nothing"), models), str(model)) == [str(model)]
    assert await ask((models,), "") == [""]
    assert await ask(None, "/anywhere") == ["/anywhere"]


@pytest.mark.parametrize(
    "model",
    [
        "/etc",
        "{models}/circle",
        "{models}/\0",
        "{models}/..",
        "{models}/../elsewhere",
        "{models}/way-out/x",
        "{models}-2/x",
        "good",
    ],
)
async def test_any_other_model_is_refused_whether_it_is_there_or_not(models: Path, model: str) -> None:
    named = model.format(models=models)
    with pytest.raises(InvalidArgumentError, match="is not in .* or set orchestrator.model_folders"):
        await ask((models,), named)


async def test_an_empty_list_lets_none_through(models: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="is not in no folder at all"):
        await ask((), str(models / "good"))
