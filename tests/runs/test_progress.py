"""Progress: whole lines in a file, a bar on a terminal."""

import io

import pytest

from sage_unsloth.runs import progress as module
from sage_unsloth.runs.progress import progress


class Output(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def three_steps(monkeypatch, terminal):
    output = Output(terminal)
    monkeypatch.setattr("sys.stderr", output)
    with progress(total=3, desc="SFT", unit="step") as bar:
        for number in range(3):
            bar.set_postfix({"loss": number})
            bar.update()
        bar.refresh()
    return output.getvalue()


@pytest.mark.smoke
def test_a_file_gets_the_first_and_the_last_line_of_a_quick_loop(monkeypatch):
    first, last, end = three_steps(monkeypatch, terminal=False).split("\n")
    assert first.startswith("SFT:   0% 0/3 [") and end == ""
    assert last.startswith("SFT: 100% 3/3 [") and "loss=2" in last


def test_a_file_gets_a_line_whenever_the_time_has_come(monkeypatch):
    monkeypatch.setattr(module, "BETWEEN_LINES", 0)
    text = three_steps(monkeypatch, terminal=False)
    assert "\r" not in text
    for done in range(4):
        assert f" {done}/3 [" in text


def test_a_line_is_written_once(monkeypatch):
    output = Output(False)
    monkeypatch.setattr("sys.stderr", output)
    progress(total=3, initial=3).close()
    progress(total=3, disable=True).close()
    assert [number for number, _ in enumerate(progress(range(2), desc="a"))] == [0, 1]
    assert output.getvalue().count("\n") == 3


def test_a_terminal_has_its_bar(monkeypatch):
    text = three_steps(monkeypatch, terminal=True)
    assert "\rSFT: 100%|##########| 3/3" in text or "\rSFT: 100%|██████████| 3/3" in text


def test_a_package_of_notebooks_makes_no_notebook():
    import ipykernel.kernelbase  # noqa: F401

    assert not module.in_notebook()
