"""Wording that the lint refuses, by the kind of text that holds it, and the baseline that may only shrink."""

from pathlib import Path

import pytest

from tools.check_prose import BASELINE, complaints, count, hits_in, main, read_baseline, shrunk, write_baseline

REFUSED = {
    "docstring": '"""Whether a step has run."""\n',
    "private docstring": 'def _run():\n    """Run it beside the others."""\n',
    "too short": 'NUM = 1\n"""A number."""\n',
    "comment": "X = 1  # kept for nobody\n",
    "comment on two lines": "X = 1\n# the bytes of so\n# many rows\n",
    "help": 'parser.add_argument("--ranks", help="of the chain")\n',
    "error": 'raise ConfigError(f"{path} is no folder: give another")\n',
    "parser's error": 'parser.error("is no folder")\n',
    "log": 'self._logger.warning("no room for it: told")\n',
    "string": 'text = "the kernel is not there: build it"\n',
    "f-string in a docstring's module": 'TEXT = f"{a} cannot be had {b} now"\n',
}
ACCEPTED = {
    "docstring": '"""Flag that is set once a step has run."""\n',
    "code in a docstring": '"""Return the `beside` of a row."""\n',
    "private docstring": 'def _run():\n    """Run it."""\n',
    "comment": "X = 1  # there is no need to copy\n",
    "comments apart": "X = 1  # bytes of so\nLONG = 2  # many rows\n",
    "help": 'parser.add_argument("--ranks", metavar="N", help="number of ranks of the chain")\n',
    "error": 'raise ConfigError(f"{path} is not a folder: there is no file in it")\n',
    "log": 'self._logger.warning("%s is no longer reachable", group)\n',
    "short string": 'KEY = "beside"\n',
    "number of something": '"""Return as many tokens as fit into a page."""\n',
}


def names(root: Path, file: str, text: str) -> list[tuple[str, int, str]]:
    """Write a file and return scope, line and pattern of each hit in the checkout."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [(hit.scope, hit.line, hit.pattern.name) for hit in hits_in(root)]


@pytest.mark.parametrize("kind", REFUSED)
def test_wording_is_refused_in_each_kind_of_text(kind: str, tmp_path: Path) -> None:
    ((scope, _, _),) = names(tmp_path, "baton/text/module.py", REFUSED[kind])
    expected = {"private docstring": "docstring", "too short": "docstring", "parser's error": "error"}
    assert scope == expected.get(kind, kind.split(" ")[0].replace("f-string", "string"))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_plain_wording_and_code_are_accepted(kind: str, tmp_path: Path) -> None:
    assert names(tmp_path, "baton/text/module.py", ACCEPTED[kind]) == []


def test_the_line_of_a_hit_is_that_on_which_its_words_begin(tmp_path: Path) -> None:
    text = '"""Reads a model\'s files.\n\nAll of them, but\nfor the largest.\n"""\n\nX = 1\n# a\n# whoever\n'
    assert names(tmp_path, "baton/text/module.py", text) == [("docstring", 3, "but-for"), ("comment", 9, "nobody")]


def test_help_texts_of_metrics_do_not_continue_their_names(tmp_path: Path) -> None:
    text = 'gauge("baton_kv_bytes", "Of that, pages")\n'
    assert names(tmp_path, "orchestrator/observability/cluster_metrics.py", text) == []
    text = 'gauge("baton_kv_bytes", "Of that, all pages")\n'
    assert names(tmp_path, "orchestrator/observability/cluster_metrics.py", text) == [("metric", 1, "start")]
    assert names(tmp_path, "orchestrator/observability/cluster_metrics.py", "") == []


def test_documents_are_read_without_their_code(tmp_path: Path) -> None:
    code = "# A page\n\n`beside` and\n\n    ```\n    beside\n    ```\n\n~~~ sh\nwhoever\n~~~\n"
    assert names(tmp_path, "docs/decisions/page.md", code) == []
    assert names(tmp_path, "docs/decisions/page.md", code + "All, but\nfor one.\n") == [("document", 12, "but-for")]


def test_tests_and_generated_stubs_are_not_read(tmp_path: Path) -> None:
    for file in ("tests/unit/test_a.py", "baton/v1/a_pb2.py"):
        assert names(tmp_path, file, '"""Beside."""\n') == []


def test_a_file_may_have_the_hits_of_its_baseline_and_neither_more_nor_fewer(tmp_path: Path) -> None:
    names(tmp_path, "baton/text/old.py", "# beside\n\nX = 1  # anew\n")
    found = list(hits_in(tmp_path))
    assert complaints(found, {("baton/text/old.py", "beside"): 1, ("baton/text/old.py", "anew"): 1}) == []
    (line,) = complaints(found, {("baton/text/old.py", "beside"): 1})
    assert line == "baton/text/old.py:3 comment anew: 'anew' -> again"
    (line,) = complaints(found, {("baton/text/old.py", "beside"): 1, ("baton/text/old.py", "anew"): 2})
    assert line == "baton/text/old.py anew: 1 hits, 2 in the baseline: run --update-baseline"
    (line,) = complaints(found, {**count(found), ("baton/text/gone.py", "anew"): 1})
    assert line.startswith("baton/text/gone.py anew: 0 hits, 1 in the baseline")


def test_an_update_lowers_counts_and_neither_raises_nor_adds_any() -> None:
    baseline = {("a", "beside"): 3, ("a", "anew"): 1, ("b", "anew"): 2}
    counts = {("a", "beside"): 2, ("b", "anew"): 5, ("c", "anew"): 1}
    assert shrunk(baseline, counts, {}) == {("a", "beside"): 2, ("b", "anew"): 2}


def test_an_update_follows_renamed_files() -> None:
    old, new = "baton/text/old.py", "baton/text/new.py"
    counts = {(new, "anew"): 2, (new, "beside"): 1}
    assert shrunk({(old, "anew"): 2}, counts, {old: new}) == {(new, "anew"): 2}


def test_a_baseline_is_read_as_it_is_written(tmp_path: Path) -> None:
    counts = {("b", "anew"): 2, ("a", "beside"): 1, ("a", "anew"): 1}
    write_baseline(tmp_path / "baseline.tsv", counts)
    assert read_baseline(tmp_path / "baseline.tsv") == counts
    assert (tmp_path / "baseline.tsv").read_text().splitlines()[1:] == ["a\tanew\t1", "a\tbeside\t1", "b\tanew\t2"]


def test_a_first_baseline_is_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names(tmp_path, "tools/old.py", "# beside\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["check_prose.py"])
    assert main() == 1
    monkeypatch.setattr("sys.argv", ["check_prose.py", "--create"])
    assert main() == 0
    assert read_baseline(tmp_path / BASELINE) == {("tools/old.py", "beside"): 1}
    with pytest.raises(SystemExit):
        main()
    assert "exists: use --update-baseline" in capsys.readouterr().err
