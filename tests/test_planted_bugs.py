"""The list of planted bugs is in line with today's code, and the record with the list."""

import json

import planted_bugs
import pytest

pytestmark = pytest.mark.smoke


def test_every_text_occurs_once_in_its_file():
    assert not planted_bugs.misplaced(planted_bugs.BUGS)


def test_a_text_that_is_gone_or_occurs_twice_is_named(tmp_path):
    (tmp_path / "sage_unsloth").mkdir()
    (tmp_path / "sage_unsloth" / "one.py").write_text("a = b\na = c\n")
    texts = [("one.py", "a = b"), ("one.py", "a = "), ("one.py", "d"), ("two.py", "a")]
    bugs = [planted_bugs.Bug(file, text, "", ()) for file, text in texts]
    lines = planted_bugs.misplaced(bugs, tmp_path)
    assert [line.split(" must")[0] for line in lines] == [f"{f}: {t!r}" for f, t in texts[1:]]


def test_nothing_is_tried_with_a_list_that_is_out_of_line(monkeypatch, tmp_path):
    gone = planted_bugs.BUGS[0]._replace(find="no such text")
    monkeypatch.setattr(planted_bugs, "BUGS", [gone])
    monkeypatch.setattr("sys.argv", ["planted_bugs.py", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="no such text' must occur once; 0 times"):
        planted_bugs.main()
    assert not list(tmp_path.iterdir())


def test_every_named_test_exists():
    for bug in planted_bugs.BUGS:
        for test in bug.tests:
            file, _, name = test.partition("::")
            source = (planted_bugs.ROOT / "tests" / file).read_text()
            assert f"def {name}(" in source if name else "def test_" in source, test


def test_the_committed_bugs_are_noticed():
    """Of tests/planted_bugs.py, each tried once."""
    record = json.loads(planted_bugs.OUT.read_text())
    tried = {(row["file"], row["find"], row["replace"]): row["noticed"] for row in record["bugs"]}
    assert tried.keys() == {(bug.file, bug.find, bug.replace) for bug in planted_bugs.BUGS}
    assert len(tried) >= 40 and all(tried.values())
