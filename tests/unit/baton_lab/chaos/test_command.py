"""The command line of `baton chaos`."""

import pytest

from deploy.cli import main
from tests.support.wire.commands import Baton


@pytest.mark.parametrize("options", ["--seeds 0", "--requests 0", "--blows -1", "--hung -1", "--slow -1"])
def test_a_number_out_of_range_is_named(options: str, baton: Baton) -> None:
    assert baton.refusal(f"chaos {options}").startswith(f"baton: {options} is out of range")


def test_more_faulty_engines_than_there_are_is_refused(baton: Baton) -> None:
    refusal = baton.refusal("chaos --hung 2 --slow 1")
    assert refusal.startswith("baton: --hung 2 and --slow 1 are more than the 2 engines")


@pytest.mark.parametrize("assignment", ["model.dtype=bfloat16", "generate.num_slots=2", "speculation=auto"])
def test_a_setting_that_is_not_the_engines_own_is_named(assignment: str, baton: Baton) -> None:
    refusal = baton.refusal(f"chaos --set {assignment}")
    assert refusal.startswith(f"baton: --set {assignment!r} cannot be set here: use fields of generate")


def test_one_seed_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--seed", "3", "--seeds", "5"])
    assert "not allowed with" in capsys.readouterr().err
