"""The order of the files that run at night, and the warnings about files that have not passed for long."""

from tools.nightly import HEADER, STALE_COMMITS, Run, oldest_first, read_ledger, stale_files

HERE, CONFTEST = "tests/unit/tools/test_nightly.py", "tests/conftest.py"


def run(file: str, result: str = "passed", commit: str = "aaaaaaaaaa") -> Run:
    return Run(file, commit, "AMD EPYC avx2", result, 12)


def test_a_ledger_is_read_as_it_is_written() -> None:
    row = run("tests/test_a.py")
    text = "\t".join(HEADER) + "\n" + "tests/test_a.py\taaaaaaaaaa\tAMD EPYC avx2\tpassed\t12\n"
    assert read_ledger(text) == [row]
    assert read_ledger("") == []


def test_files_that_never_passed_come_first_then_those_that_passed_longest_ago() -> None:
    runs = [run("b"), run("c"), run("a"), run("b"), run("d", "failed"), run("c", "failed")]
    assert oldest_first(["a", "b", "c", "d", "e"], runs) == ["d", "e", "c", "a", "b"]


def test_a_file_that_was_interrupted_goes_to_the_end() -> None:
    assert oldest_first(["a", "b"], [run("b"), run("a", "late")]) == ["b", "a"]
    (line,) = stale_files([run(HERE, "late")], {})
    assert line.startswith(f"{HERE} has not passed at night")


def test_a_file_that_has_not_passed_for_too_many_commits_is_named() -> None:
    ages = {"old": STALE_COMMITS + 1, "new": STALE_COMMITS}
    (line,) = stale_files([run(HERE, commit="old"), run(CONFTEST, commit="new")], ages)
    assert line.startswith(f"{HERE} last passed at night over {STALE_COMMITS} commits ago")


def test_a_later_pass_ends_the_warning_and_a_later_failure_does_not_begin_one() -> None:
    ages = {"old": STALE_COMMITS + 1, "new": 3}
    passed = [run(HERE, commit="old"), run(HERE, commit="new")]
    assert stale_files(passed, ages) == []
    assert stale_files([*passed, run(HERE, "failed", "new")], ages) == []


def test_a_file_that_never_passed_and_one_of_an_unknown_commit_are_named() -> None:
    lines = stale_files([run(HERE, "failed"), run(CONFTEST, commit="gone")], {})
    assert [line.split(" ")[0] for line in lines] == [CONFTEST, HERE]


def test_a_file_that_is_gone_is_not_named() -> None:
    assert stale_files([run("tests/no_such_file.py", "failed")], {}) == []
