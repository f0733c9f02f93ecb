"""The command line of `baton chaos`."""

import pytest

from deploy.cli import main


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--requests", "0"], ["--blows", "-1"]])
def test_a_number_out_of_range_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *options]) == 2
    assert capsys.readouterr().err.startswith(f"baton: {' '.join(options)} is out of range")


@pytest.mark.parametrize("assignment", ["model.dtype=bfloat16", "generate.num_slots=2", "speculation=auto"])
def test_a_setting_that_is_not_the_engines_own_is_named(assignment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--set", assignment]) == 2
    assert capsys.readouterr().err.startswith(f"baton: --set {assignment!r} cannot be set here: use fields of generate")


def test_one_seed_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--seed", "3", "--seeds", "5"])
    assert "not allowed with" in capsys.readouterr().err
