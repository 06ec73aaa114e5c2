"""Tests with the real vLLM (`vllm_cpu`): each in a process of its own.

An engine leaves settings behind in its process (threads, memory, what Unsloth replaced), and one
that dies may take the process with it. What such a test needs it makes by functions that it calls,
so that nothing is started in the process that collects.
"""

import os
import subprocess
import sys

import pytest

from sage_unsloth.patch import cpu_vllm

INSIDE = "SAGE_UNSLOTH_TEST_OF_ITS_OWN"
SECONDS = 600


def pytest_collection_modifyitems(items):
    if cpu_vllm.is_installed():
        return
    why = pytest.mark.skip(reason="needs the environment that tests/engines/environment.py makes")
    for item in items:
        if item.get_closest_marker("vllm_cpu"):
            item.add_marker(why)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker("vllm_cpu") or os.environ.get(INSIDE):
        return None
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env=os.environ | {INSIDE: "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}", False)
    return True
