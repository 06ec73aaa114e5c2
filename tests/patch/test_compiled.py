"""The guided loss with torch.compile on: compiled once, not every step, and never left for
eager.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
TESTS = Path(__file__).parents[1]
STEPS = 5

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import conftest
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.trainers.loading import load_unsloth
from sage_unsloth.objective.guides import BranchGuide
module = load_unsloth()
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

class Count(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        graphs.append(counters["stats"]["unique_graphs"])

branch = BranchGuide(threshold=1.0)
reference = BranchGuide(threshold=1.0, source="reference")
for name, guide, kl_estimator, credit in (
    ("plain", None, "k3", "token"),
    ("branch", branch, "k3", "token"),
    ("k2", branch, "k2", "token"),
    ("exact", reference, "k3-is", "sequence"),
):
    if name not in sys.argv[4:]:
        continue
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    trainer = conftest.build_trainer(
        sys.argv[2],
        max_steps=int(sys.argv[3]),
        gradient_accumulation_steps=1,
        use_bias_correction_kl=kl_estimator == "k3-is",
        learning_rate=1e-3,
    )
    trainer.add_callback(Count())
    with with_methods(trainer, guide, kl_estimator=kl_estimator, credit=credit):
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    breaks = sum(counters["graph_break"].values())
    print("RESULT", json.dumps([name, {"graphs": graphs, "breaks": breaks, "losses": losses}]))
"""


def run(folder, compiled, names):
    """What each way of training leaves, all of them in one process that has forgotten the graphs of
    the one before.
    """
    environment = os.environ | {
        "UNSLOTH_COMPILE_DISABLE": "0" if compiled else "1",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TORCH_COMPILE_DISABLE": "0",
    }
    # Where CI is set, torch raises on an aliasing in Inductor's own buffers that it tolerates
    # everywhere else.
    environment.pop("CI", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(TESTS), str(folder / "out"), str(STEPS), *names],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(names), done.stdout[-3000:] + done.stderr[-3000:]
    assert "falling back to eager" not in (done.stdout + done.stderr).lower()
    return dict(json.loads(line.removeprefix("RESULT")) for line in lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(compiled, eager); the graphs of the loss without a guide are counted where it compiles."""
    guides = ("branch", "k2", "exact")
    return (
        run(tmp_path_factory.mktemp("runs"), True, ("plain", *guides)),
        run(tmp_path_factory.mktemp("runs"), False, guides),
    )


@pytest.mark.parametrize("guide", ["branch", "k2", "exact"])
def test_compiled_once_and_equal_to_eager(runs, guide):
    compiled, eager = (found[guide] for found in runs)
    plain = runs[0]["plain"]
    # With compilation off Unsloth still compiles one small function of its own.
    assert compiled["graphs"][0] > eager["graphs"][0], "nothing was compiled, so nothing was tested"
    assert compiled["breaks"] == 0
    # Shapes vary from step to step; graphs that are generic in them are settled by the third step.
    assert compiled["graphs"][2] == compiled["graphs"][-1]
    assert compiled["graphs"][-1] <= plain["graphs"][-1] + 2
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4, abs=1e-6)
