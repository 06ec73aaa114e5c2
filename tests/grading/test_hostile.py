"""What a model, a file or a hub wrote is data.

It is graded without being run, shown without being obeyed, named without leaving its folder.
"""

import argparse
import ast
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from multiprocessing import connection
from pathlib import Path

import fuzz_grading
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_unsloth.grading import confinement
from sage_unsloth.grading import worker as worker_module
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.worker import LATE, Worker
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.text import escape_markdown, file_name, log_to_terminal, printable

ROOT = Path(__file__).parents[2]
TERMINAL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\b\u202e\u2066\ud800"

# --- nothing evaluates an answer ------------------------------------------------------------------


def payloads(file):
    """Code in the places where a parser may look: alone, in a command's argument, in an equation,
    in a sum.
    """
    code = [
        text.replace("TOUCH", f"touch {file}").replace("FILE", str(file))
        for text in fuzz_grading.CODE
    ]
    arithmetic = [
        "3 (4)",
        "2(3)(4)",
        "9 . 1",
        "1 if 1 else 2",
        "1(lambda:0)",
        "4.real",
        "3.__class__",
        "0x1",
        "1;2",
        "1e5",
        "٣+٤",
    ]
    forms = ("{}", r"\text{{{}}}", "x = 1 + {}")
    texts = [form.format(text) for text in code for form in forms] + arithmetic
    return [text for text in texts if "10**9" not in text and "E**" not in text]  # those take time


def test_no_answer_is_compiled_or_leaves_the_process(tmp_path):
    """Under a hook that sees what Python compiles, opens and starts, before any confinement."""
    script = """
        import json, sys
        from sage_unsloth.grading.confinement import REFUSED
        from sage_unsloth.grading.mathematics import compare_math, normalise
        texts = [text for text in map(normalise, json.load(sys.stdin)) if text]
        compare_math("1+x", "x+1")
        compiled, tried = [], set()
        def hook(event, arguments):
            if event == "compile":
                compiled.append(str(arguments[0]))
            elif event.startswith(REFUSED) or event == "open" and arguments[2] and arguments[2] & 3:
                tried.add(event)
        sys.addaudithook(hook)
        for text in texts:
            compare_math(text, "42"), compare_math(text, "x+1")
        count = len(compiled)
        compile("1", "", "eval")
        print(json.dumps([len(texts), count, len(compiled), sorted(tried)]))
    """
    file = tmp_path / "owned"
    done = run(script, json.dumps(payloads(file)))
    texts, compiled, with_one_of_ours, tried = json.loads(done.stdout)
    assert texts > 70 and with_one_of_ours == compiled + 1, "the hook saw nothing"
    assert compiled == 0 and tried == [] and not file.exists()


def run(script, text=""):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input=text,
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# --- and what code would find if something did ----------------------------------------------------

ATTACKS = '''
"""Functions for a worker: each does what an answer that got executed might do."""
import ctypes, json, os, shutil, socket, subprocess, time

libc = ctypes.CDLL(None)
# Before the hook is there.
c_open, c_mkdir, c_unlink = libc.open, libc.mkdir, libc.unlink
c_rename, c_system, c_kill = libc.rename, libc.system, libc.kill


def by_python(action, argument):
    if action == "x":
        return None
    file = argument + "/owned"
    {
        "open": lambda: open(file, "w"),
        "append": lambda: open(argument + "/there", "a"),
        "os.open": lambda: os.open(file, os.O_CREAT),
        "os.mkdir": lambda: os.mkdir(file),
        "os.remove": lambda: os.remove(argument + "/there"),
        "os.rename": lambda: os.rename(argument + "/there", file),
        "os.system": lambda: os.system("touch " + file),
        "subprocess": lambda: subprocess.run(["touch", file]),
        "os.fork": lambda: os.fork(),
        "os.kill": lambda: os.kill(os.getppid(), 0),
        "socket": lambda: socket.create_connection(("127.0.0.1", 9)),
        "ctypes": lambda: ctypes.CDLL(None),
    }[action]()
    return "done"


def by_c(argument, _):
    """The same past Python, and so past its hook: what the C library returned."""
    if argument == "x":
        return None
    file, there = (argument + "/owned").encode(), (argument + "/there").encode()
    return {
        "open": c_open(file, os.O_CREAT | os.O_WRONLY, 0o600),
        "append": c_open(there, os.O_WRONLY),
        "mkdir": c_mkdir(file, 0o700),
        "unlink": c_unlink(there),
        "rename": c_rename(there, file),
        "system": c_system(b"touch " + file),
        "kill": c_kill(os.getppid(), 0),
    }


class Sockets:
    made = None


def by_socket(port, _):
    """With sockets that were made before the hook was there."""
    if port == "x":
        Sockets.made = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        return None
    found = {}
    for name, one in zip(("tcp", "udp"), Sockets.made):
        try:
            libc_connect(one.fileno(), int(port))
            found[name] = os.write(one.fileno(), b"secret")
        except OSError as error:
            found[name] = -error.errno
    return found


_connect, _address = libc.connect, ctypes.create_string_buffer(16)


def libc_connect(descriptor, port):
    family = (2).to_bytes(2, "little")
    _address.raw = family + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    if _connect(descriptor, _address, 16):
        raise OSError(1, "connect")


def environment(name, _):
    if name == "x":
        return None
    try:
        with open(f"/proc/{os.getppid()}/environ") as file:
            parents = len(file.read())
    except OSError:
        parents = None
    files = sorted(os.listdir("/proc/self/fd"))
    return {"own": dict(os.environ), "parents": parents, "files": files}


def replies(action, _):
    """Writes to the pipe that the replies go through."""
    import stat
    if action == "x":
        return None
    reply = {
        "half": b'{"va',
        "junk": b"junk\\n",
        "list": b"[1]\\n",
        "flood": b"x" * 2**22,
        "odd": b'{"a": 1}\\n',
        "nothing": b"",
    }[action]
    for number in range(3, 32):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, reply)
        except OSError:
            pass
    time.sleep(30)
'''


@pytest.fixture
def attack(tmp_path, monkeypatch):
    """A factory of a worker for one of the functions above; the folder `target` holds the file
    `there`.
    """
    (tmp_path / "attacks.py").write_text(ATTACKS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "there").write_text("kept")
    made = []

    def make(name, time_limit=20.0):
        made.append(Worker(f"attacks:{name}", time_limit, 1.0))
        made[-1].start()
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


def needs(worker, layer):
    """Skips where the kernel has no such layer, asked apart from the code under test; where it has,
    the worker must have it.
    """
    probe = {
        "landlock": "libc.syscall(444, None, 0, 1) >= 1",
        "namespace": "libc.unshare(0x50000000) == 0",
    }[layer]
    script = f"import ctypes, sys; libc = ctypes.CDLL(None); sys.exit(not ({probe}))"
    if subprocess.run([sys.executable, "-c", script], check=False).returncode:
        pytest.skip(f"this kernel grants no {layer}")
    assert layer in worker.kept_from


@pytest.mark.parametrize(
    "action",
    [
        "open",
        "append",
        "os.open",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.system",
        "subprocess",
        "os.fork",
        "os.kill",
        "socket",
        "ctypes",
    ],
)
def test_a_worker_that_reaches_out_is_ended_and_named(attack, action, tmp_path, caplog):
    worker, target = attack("by_python"), tmp_path / "target"
    with caplog.at_level(logging.WARNING):
        assert worker.ask((action, str(target))) is LATE
    assert worker.pid is None and worker.deaths == 1
    event = {"append": "open", "os.open": "open"}.get(action, action)
    assert f"try {event}" in caplog.text
    assert [file.name for file in target.iterdir()] == ["there"]
    assert (target / "there").read_text() == "kept"


def test_past_python_the_kernel_keeps_files_programs_and_processes(attack, tmp_path):
    worker, target = attack("by_c"), tmp_path / "target"
    needs(worker, "landlock")
    found = worker.ask((str(target), ""))
    assert found.pop("system") != 0
    assert set(found.values()) == {-1}, found
    assert [file.name for file in target.iterdir()] == ["there"]


def test_past_python_there_is_no_network(attack):
    worker = attack("by_socket")
    needs(worker, "namespace")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", tcp.getsockname()[1]))
        udp.settimeout(0.2)
        tcp.settimeout(0.2)
        found = worker.ask((str(tcp.getsockname()[1]), ""))
        assert max(found.values()) < 0, found
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(TimeoutError):
            udp.recv(100)


def test_a_worker_has_none_of_its_callers_secrets(attack, monkeypatch):
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HTTPS_PROXY",
        "HOME",
        "MY_OWN",
    ):
        monkeypatch.setenv(name, "canary")
    worker = attack("environment")
    found = worker.ask(("environment", ""))
    allowed = {
        *confinement.ALLOWED_VARIABLES,
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    }
    assert set(found["own"]) <= allowed
    assert "canary" not in json.dumps(found)
    assert len(found["files"]) <= 6, "0, 1, 2, the replies, and the folder that is listed"
    if "landlock" in worker.kept_from:
        assert found["parents"] is None


def test_root_without_a_namespace_cannot_read_its_callers_environment():
    """As in a chroot, and in containers: no user namespace, but root's capabilities."""
    script = """
import os
from sage_unsloth.grading import confinement
kept = confinement.confine(print)
try:
    print(kept, len(open(f"/proc/{os.getppid()}/environ").read()))
except PermissionError:
    print(kept, "denied")
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    if said[0] == "False":
        pytest.skip("this kernel grants no landlock")
    assert said == ["True", "denied"]


@pytest.mark.parametrize("action", ["half", "junk", "list", "odd", "flood"])
def test_nothing_in_the_reply_pipe_stops_or_breaks_the_caller(attack, action):
    worker = attack("replies", time_limit=1.0)
    started = time.monotonic()
    assert worker.ask((action, "")) is LATE
    assert time.monotonic() - started < 10
    assert worker.ask(("nothing", "")) is LATE, "what the one before wrote is no reply to this"


def test_a_worker_that_died_idle_is_replaced_and_its_question_asked(attack, monkeypatch):
    worker = attack("environment")
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.ask(("environment", "")) is not LATE
    worker.process.kill()
    worker.process.wait()
    monkeypatch.setattr(worker.process, "poll", lambda: None)  # it dies between poll and write
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.ask(("environment", "")) is not LATE
    assert worker.deaths == 0


def test_a_child_that_has_answered_before_its_caller_looks_is_known(attack, monkeypatch):
    """On a busy machine, the child before it having died idle: it is this one that must be ended
    when a later question hangs.
    """
    worker = attack("environment")
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    assert connection.wait([worker._ready], 20), "the next child"

    def look_late():  # between asking and looking
        assert connection.wait([worker._replies], 20)

    with monkeypatch.context() as busy:
        busy.setattr(worker, "_computed", look_late)
        assert worker.ask(("environment", "")) is not LATE
    assert worker.pid != first
    os.kill(worker.pid, 0)
    assert worker.ask(("environment", "")) is not LATE
    assert worker.deaths == 0


def test_limits_of_a_worker(monkeypatch):
    with Grader() as grader:
        grader.grade_many(["<SOLUTION>x+1</SOLUTION>"], ["1+x"])
        pid = grader._workers.all[0].pid
        limits = Path(f"/proc/{pid}/limits").read_text()
    found = {line[:26].strip(): line[26:].split() for line in limits.splitlines()[1:]}
    assert found["Max file size"][:2] == ["0", "0"]
    assert found["Max core file size"][:2] == ["0", "0"]
    assert found["Max processes"][:2] == ["0", "0"]
    assert found["Max open files"][:2] == [str(confinement.OPEN_FILES)] * 2
    assert found["Max address space"][:2] == [str(2**30)] * 2
    assert int(found["Max cpu time"][0]) < 120


def test_what_a_library_says_about_an_answer_stays_in_the_worker(capfd, monkeypatch):
    code = worker_module._START.replace(
        "; serve(",
        "; import os, sage_unsloth.grading.mathematics as r; r.compare_math = lambda a, g: "
        "(os.write(1, b'owned'), os.write(2, b'owned'), ['wrong', 'text'])[2] "
        "if (a, g) not in [('x', 'x'), *r.TYPICAL] else None; serve(",
    )
    monkeypatch.setattr(worker_module, "_START", code)
    with Grader() as grader:
        assert grader.grade_many(["<SOLUTION>y+z</SOLUTION>"], ["z+y"]) == [Grade.WRONG]
    assert "owned" not in "".join(capfd.readouterr())


# --- fuzzed answers -------------------------------------------------------------------------------

ROWS = read_jsonl(fuzz_grading.ANSWERS)
hostile_text = st.one_of(
    st.text(st.characters(), max_size=300),  # every code point, surrogates included
    st.lists(
        st.sampled_from(
            [
                *fuzz_grading.COMMANDS,
                *fuzz_grading.SYMBOLS,
                *fuzz_grading.ODD,
                "1",
                "x",
                "<SOLUTION>",
                "</SOLUTION>",
            ]
        ),
        max_size=60,
    ).map("".join),
    st.integers(0, 10**9).map(lambda number: fuzz_grading.make(1, number, ROWS)[1]),
)


@pytest.fixture(scope="module")
def quick():
    with Grader(time_limit=1.0, boxed=True) as grader:
        yield grader


@given(hostile_text, st.sampled_from(fuzz_grading.GOLDS))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_answer_gets_a_grade_within_the_limit(quick, text, gold):
    started = time.monotonic()
    for completion in (text, f"<SOLUTION>{text}</SOLUTION>"):
        assert quick.grade_many([completion], [gold])[0] in Grade
    assert time.monotonic() - started < 2 * (1.0 + fuzz_grading.START)


@given(hostile_text)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_text_stops_what_runs_in_this_process(text):
    started = time.monotonic()
    for completion in (text, f"<SOLUTION>{text}</SOLUTION>", rf"\boxed{{{text}}}"):
        for boxed in (False, True):
            extracted = extract_answer(completion, boxed=boxed)
            MATH.plainly(extracted, "42")
            assert isinstance(printable(completion).encode(), bytes)
    assert time.monotonic() - started < 5


def test_the_fuzzer_makes_every_kind_and_repeats_itself():
    made = [fuzz_grading.make(3, number, ROWS) for number in range(400)]
    assert {kind for kind, _, _ in made} == set(fuzz_grading.KINDS)
    assert made[7] == fuzz_grading.make(3, 7, ROWS)
    assert max(len(text) for _, text, _ in made) >= 10**6
    assert any("\ud800" <= letter <= "\udfff" for _, text, _ in made for letter in text)
    for kind, make in fuzz_grading.KINDS.items():
        arguments = (random.Random(0), ROWS) if kind == "mutated" else (random.Random(0),)
        assert isinstance(make(*arguments), str)


def test_no_answer_costs_the_caller_much():
    """The bound is 50 ms; a busy machine gets some of it again."""
    slow = []
    for number in range(300):
        _, completion, gold = fuzz_grading.make(11, number, ROWS)
        costs = [fuzz_grading.cost_to_the_caller(completion, gold) for _ in range(2)]
        seconds, mib = (min(column) for column in zip(*costs, strict=True))
        if seconds > fuzz_grading.CALLER_SECONDS or mib > fuzz_grading.CALLER_MIB:
            slow.append((number, seconds, mib))
    assert not slow


def test_the_committed_fuzzing_found_nothing_open():
    found = json.loads((ROOT / "data/results/reliability/fuzz.json").read_text())
    assert found["answers"] >= 50_000
    assert found["rules"] == MATH.label, "the rules are newer than the result: run the fuzzer again"
    assert found["environment"]["commit"]
    assert found["caller"]["most_cpu_seconds"] < fuzz_grading.CALLER_SECONDS
    assert found["caller"]["most_mib"] < fuzz_grading.CALLER_MIB
    assert sum(found["grades"].values()) == found["answers"]
    assert found["slowest"][0]["seconds"] < found["time_limit_seconds"] + fuzz_grading.START
    memory = found["parent_peak_mib"]
    growth = memory["at the end"] - memory["after the first answer"]
    assert growth * 2**20 < 10_000 * found["answers"], "what the fuzzer keeps of each answer"


def test_long_answers_are_not_kept():
    with Grader() as grader:
        long = ["<SOLUTION>" + letter * 100_000 + "</SOLUTION>" for letter in "abc"]
        assert grader.grade_many([*long, "<SOLUTION>42</SOLUTION>", "none"], ["42"] * 5) == [
            Grade.UNPARSABLE,
            Grade.UNPARSABLE,
            Grade.UNPARSABLE,
            Grade.CORRECT,
            Grade.UNPARSABLE,
        ]
        assert set(grader._cache) == {("42", "42"), (None, "42")}


# --- what is shown, and how it is named -----------------------------------------------------------


def test_a_terminal_gets_no_control_characters():
    shown = printable(f"a{TERMINAL}b\n\tc")
    assert shown.startswith("a␛]0;owned␇␛[2J\ufffd31m␍␈") and shown.endswith("b\n\tc")
    assert all(ord(c) >= 0x20 or c in "\n\t" for c in shown)
    assert not any(
        0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 or c in "\u202e\u2066" for c in shown
    )
    assert printable("é漢🙂 \\frac{1}{2}\n") == "é漢🙂 \\frac{1}{2}\n"


def test_tables_logs_and_errors_are_printable(capsys, monkeypatch):
    from sage_unsloth import __main__
    from sage_unsloth.figures import show_table

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_table([{"problem": f"p{TERMINAL}", "model": TERMINAL}])
    log_to_terminal()
    logging.getLogger("sage_unsloth").warning("found %s", TERMINAL)

    def refuse(options):
        raise ValueError(f"bad row {TERMINAL}")

    parser = argparse.ArgumentParser()
    parser.set_defaults(act=refuse)
    monkeypatch.setattr(__main__, "make_parser", lambda only: parser)
    assert __main__.main([]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.count("␛]0;owned") == 4
    assert not any(c in shown for c in TERMINAL if c not in "]0;owned[2J31m")


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "../../x",
        "/etc/passwd",
        "a/../b",
        "a\x00b",
        "C:\\x",
        "~",
        "",
        ".hidden",
        "a\nb",
        "x" * 40,
    ],
)
def test_a_name_stays_in_its_folder(tmp_path, name):
    inside = tmp_path / "out" / file_name(name)
    assert inside.resolve().parent == tmp_path / "out"
    inside.parent.mkdir()
    inside.touch()
    assert not inside.name.startswith(".")
    assert file_name("math500-l5_v1.2") == "math500-l5_v1.2"


def test_markdown_shows_what_it_is_given():
    text = "</td>|<img src=x onerror=alert(1)>\n# h `c` [a](javascript:1) **b**\x1b"
    shown = escape_markdown(text)
    assert "\n" not in shown and "\x1b" not in shown
    assert not any(shown[i - 1] != "\\" for i, c in enumerate(shown) if c in "<>|`*&")
    assert "[a\\](" in shown and shown.startswith("\\</td\\>\\|")
    assert (
        escape_markdown("sage-branch, 1.5B: [0.1, 0.2] (r_max = 8)")
        == "sage-branch, 1.5B: [0.1, 0.2] (r_max = 8)"
    )


def test_a_model_card_says_what_it_is_given_and_does_nothing():
    from sage_unsloth.export.model_card import model_card

    bad = (
        'x"); import os; os.system("id")\n```\n<img src=x onerror=alert(1)> [a](javascript:1) '
        "| `b` \x1b[2J"
    )
    environment = {"python": "3", "packages": {bad: bad}, "commit": bad}
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    for kind in ("adapter", "merged"):
        card = model_card(
            kind=kind,
            name=bad,
            base=f"a/{bad}",
            license=bad,
            loads_on=bad,
            checks={bad: bad},
            metrics=[],
            record={
                "settings": {"stage": "rlvr", "guide": bad, "lora": {bad: bad}},
                "environment": environment,
            },
            report={"pass_at_k": {bad: {bad: {"1": estimate}}}},
        )
        header, body = card.split("\n---\n", 1)
        assert "\n```\n<img" not in card and "\x1b" not in card
        assert set(yaml.safe_load(header)) == {
            "base_model",
            "license",
            "license_name",
            "license_link",
            "library_name",
            "pipeline_tag",
            "tags",
        }
        code = body.split("```python\n")[1].split("\n```\n")[0]
        called = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Call)
        }
        assert called <= {
            "AutoModelForCausalLM.from_pretrained",
            "AutoTokenizer.from_pretrained",
            "PeftModel.from_pretrained",
            "tokenizer.apply_chat_template",
            "model.generate",
            "tokenizer.decode",
            "print",
        }
        text = re.sub(r"(?<!\\)`[^`]*`", "", body.replace(f"```python\n{code}\n```\n", ""))
        assert not re.search(r"(?<!\\)[<`]|(?<!\\)\]\(javascript|\n\|[^\n]*[^ \\]\|[^ \n]", text)
        assert "\\<img src=x" in text and "[a\\](javascript" in text


# --- code, pickles, secrets -----------------------------------------------------------------------


def sources():
    return [
        *sorted((ROOT / "sage_unsloth").rglob("*.py")),
        *sorted((ROOT / "notebooks" / "src").glob("*.py")),
    ]


def calls(tree):
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_of_ours_trusts_remote_code_or_unpickles():
    """Programs that are graded are executed in one module, in a process that is confined before."""
    executes = Counter()
    # A job goes to a process of its own through a pipe that no other process has.
    # A file of settings is YAML, read by `safe_load` alone (below).
    allowed = {
        "side_by_side.py": {"pickle"},
        "side_by_side_worker.py": {"pickle"},
        "setting_options.py": {"yaml"},
    }
    for path in sources():
        text = path.read_text()
        assert "trust_remote_code" not in text and "allow_pickle" not in text, path
        tree = ast.parse(text)
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not (imported - allowed.get(path.name, set())) & {
            "pickle",
            "cloudpickle",
            "joblib",
            "dill",
            "shelve",
            "marshal",
            "yaml",
        }, path
        for node, name in calls(tree):
            executes[path.name] += name == "exec"
            assert not name.startswith("yaml.") or name == "yaml.safe_load", f"{path}:{node.lineno}"
            assert name not in ("eval", "torch.load", "np.load", "os.system", "os.popen"), (
                f"{path}:{node.lineno}"
            )
            assert not any(keyword.arg == "shell" for keyword in node.keywords), (
                f"{path}:{node.lineno}"
            )
            if name == "AutoModelForCausalLM.from_pretrained":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("use_safetensors") == "True" or "gguf_file" in given, (
                    f"{path}:{node.lineno}"
                )
    assert +executes == {"program_server.py": 2}


def installed(module, file):
    from importlib.util import find_spec

    return Path(find_spec(module).submodule_search_locations[0]) / file


def test_what_we_call_does_not_trust_remote_code_unasked():
    """By the installed source: the defaults of Unsloth's loaders, and every `torch.load` of a
    resumed trainer.
    """
    found = []
    for file in ("models/loader.py", "models/llama.py", "models/vision.py"):
        for node in ast.walk(ast.parse(installed("unsloth", file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
                defaults = (
                    [None] * (len(node.args.args) - len(node.args.defaults))
                    + node.args.defaults
                    + node.args.kw_defaults
                )
                found += [
                    default
                    for name, default in zip(names, defaults, strict=True)
                    if name == "trust_remote_code" and default
                ]
    assert found and all(ast.unparse(default) in ("False", "None") for default in found)
    loads = [
        node
        for node, name in calls(ast.parse(installed("transformers", "trainer.py").read_text()))
        if name == "torch.load"
    ]
    assert len(loads) > 5
    for node in loads:
        assert ("weights_only", "True") in [(k.arg, ast.unparse(k.value)) for k in node.keywords]


def test_weights_in_pickles_are_refused(tmp_path):
    import shutil

    import torch

    from sage_unsloth.analysis.perplexity import load_scorer
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.models.weights import check_adapter_fits

    folder = tmp_path / "model"
    shutil.copytree(data_folder() / "arithmetic-base", folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    for load in (load_policy, load_scorer):
        with pytest.raises(
            ValueError,
            match=r"must be safetensors, .* has only pytorch_model\.bin. If you trust it",
        ):
            load(folder)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    torch.save({}, adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has only adapter_model\.bin"):
        check_adapter_fits(data_folder() / "arithmetic-base", adapter)


def test_a_hostile_chat_template_is_replaced_and_would_be_confined(tmp_path):
    import shutil

    from jinja2.exceptions import SecurityError

    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.models.tokenizers import load_tokenizer
    from sage_unsloth.prompts import CHAT_TEMPLATE, render_prompt

    folder = tmp_path / "model"
    shutil.copytree(data_folder() / "arithmetic-base", folder)
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(hostile)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    # What a problem says is text, and no template.
    assert "{{ 7*7 }}" in render_prompt(tokenizer, "{{ 7*7 }}")
    tokenizer.chat_template = hostile
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_secrets_are_in_no_log_and_no_error(monkeypatch, caplog, capsys, tmp_path):
    from sage_unsloth import __main__
    from sage_unsloth.runs.record import environment, open_run
    from sage_unsloth.runs.text import without_secrets

    secrets = {
        "HF_TOKEN": "hf_canaryCANARY",
        "WANDB_API_KEY": "wandb-canary-1",
        "MY_PASSWORD": "s3cret-canary",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    text = " ".join(secrets.values()) + " https://me:pw@huggingface.co/x http://hf_x@host/y a@b.c"
    assert (
        without_secrets(text) == "*** *** *** https://***@huggingface.co/x http://***@host/y a@b.c"
    )
    assert "canary" not in json.dumps(environment()).lower()
    open_run(tmp_path / "run", {"stage": "x"})
    assert "canary" not in (tmp_path / "run" / "run.json").read_text().lower()

    def refuse(options):
        logging.getLogger("sage_unsloth").warning("retrying with %s", secrets["HF_TOKEN"])
        raise ValueError(
            f"401 for https://user:canary@huggingface.co, Bearer {secrets['HF_TOKEN']}"
        )

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    parser = argparse.ArgumentParser()
    parser.set_defaults(act=refuse)
    monkeypatch.setattr(__main__, "make_parser", lambda only: parser)
    assert __main__.main([]) == 2
    shown = "".join(capsys.readouterr())
    assert "retrying with ***" in shown and "Bearer ***" in shown
    assert "canary" not in shown.lower()


def test_the_search_for_secrets_finds_one(tmp_path):
    from conftest import CANARY, files_with_canary

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert files_with_canary(tmp_path) == []
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"x": "{CANARY[:9]}')
    assert files_with_canary(tmp_path) == []
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"x": "{CANARY}"}}')
    assert [file.name for file in files_with_canary(tmp_path)] == ["metrics.jsonl"]
    (tmp_path / "run" / "metrics.jsonl").unlink()
