"""Tests with the real vLLM (`vllm_cpu`): each in a process of its own.

An engine leaves settings behind in its process (threads, memory, what Unsloth replaced), and one
that dies may take the process with it. So each test is a fork of this process, which has imported
the libraries, once, and starts no engine: importing takes longer than most tests.
"""

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback

import pytest

from sage_unsloth.trainers import cpu_vllm

SECONDS = 1500
LIBRARIES = ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "transformers", "peft")


def pytest_collection_modifyitems(items):
    if cpu_vllm.has_cpu_vllm():
        return
    why = pytest.mark.skip(reason="needs the environment that tests/engines/environment.py makes")
    for item in items:
        if item.get_closest_marker("vllm_cpu"):
            item.add_marker(why)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker("vllm_cpu"):
        return None
    cpu_vllm.run_in_this_process()
    if pyfuncitem.get_closest_marker("with_unsloth"):
        from sage_unsloth.trainers.loading import load_unsloth

        load_unsloth()
    for name in LIBRARIES:
        importlib.import_module(name)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    said, code = forked(lambda: pyfuncitem.obj(**arguments))
    if code:
        pytest.fail(f"exit {code}\n{said}", pytrace=False)
    return True


def forked(call):
    """What a call raised, as text, and the exit code of the process that made it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.enable()
        text, code = "", 0
        try:
            try:
                call()
            except BaseException:
                text, code = traceback.format_exc(), 1
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(text)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code)  # whatever happens, this process is no pytest
    os.close(writing)
    end = time.monotonic() + SECONDS
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        return pipe.read(), os.waitstatus_to_exitcode(found[1])
