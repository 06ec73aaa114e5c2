"""Run the tests with the real vLLM and keep what was found.

    python tests/engines/environment.py .vllm
    .vllm/bin/python tests/engines/run.py --out data/results/reliability/vllm_cpu.json

`tests/sampling/test_vllm_result.py` reads the committed result: every test that there is must be in
it, and passed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "data" / "results" / "reliability" / "vllm_cpu.json"


def outcomes(report: Path) -> dict[str, dict]:
    """Of a junit report: test -> outcome and seconds."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = kinds[0] if kinds else "passed"
        found[name] = {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("-n", default="2", help="tests at a time (default: %(default)s)")
    parser.add_argument("--only", help="pytest's -k: the others keep the outcome that they have")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from sage_unsloth.runs.files import write_json
    from sage_unsloth.runs.record import environment

    known = {}
    if options.only and options.out.exists():
        known = json.loads(options.out.read_text(encoding="utf-8"))["tests"]
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "vllm_cpu", "tests/engines", "-q"]
        command += [f"--junitxml={report}", "-n", options.n, "--dist", "loadfile"]
        command += ["-k", options.only] if options.only else []
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 1):
            return code
        result = {"tests": known | outcomes(report), "environment": environment()}
    write_json(options.out, result)
    print(json.dumps({k: v["outcome"] for k, v in result["tests"].items()}, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
