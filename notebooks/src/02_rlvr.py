# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · RLVR: GRPO, SAGE and the rest of the table, from one notebook
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb)
#
# **At the end you have** a trained adapter of the algorithm you chose, every step's metrics,
# samples of graded completions, and the next command. Run it once for each algorithm: data order
# and seeds are the same, so only the algorithm differs.
#
# **Cost.** 1,000 steps of 8 completions with Qwen2.5-Math-7B on one GPU: **not measured**, no GPU
# has run this yet. The plan below computes the memory before anything is loaded, and the first step
# tells the time. The run in this file is the embedded model on a CPU.
#
# If the runtime disconnects, run all cells again: training resumes from the last checkpoint, with
# the same guide, data order and random state.

# %% [markdown]
# ## Install
# Nothing is done where all is there. Elsewhere this looks at the card and at what the image brings,
# says what it keeps and why, and installs the rest; it asks for a restart only where it replaced a
# package that the kernel had loaded.

# %%
import importlib.util

if importlib.util.find_spec("sage_unsloth") is None:
    # %pip install -q --no-deps "lazy_loader>=0.5" "sage_unsloth @ git+https://github.com/sage-unsloth/sage_unsloth"
    pass

from sage_unsloth import hosted

hosted.install(vllm=True)  # with vLLM where it runs

# %%
from sage_unsloth import doctor

assert doctor.run() == 0, "see the remedies above"

# %% [markdown]
# ## Parameters

# %% tags=["parameters"]
from sage_unsloth.runs.record import runs_folder

ALGORITHM = "sage-branch"  # a row of the table below
# Google Drive on Colab once mounted, /kaggle/working on Kaggle, "runs" elsewhere
RUNS = runs_folder()
START = RUNS / "sft"  # the SFT run of 01_sft; or a preset, a model folder or a hub id
OUT = RUNS / ALGORITHM  # a second run with the same folder resumes, or shows the finished run
# a local copy of DAPO-Math-17k-Processed (.jsonl, .json, .parquet) where the hub is out of reach
DATA_FILE = None
SMOKE = False  # True: seconds, and only shows that everything works
SETTINGS = {}  # fields of RlvrConfig, such as {"max_steps": 200, "reference": "base"}

# %% [markdown]
# ## The algorithms
# Each row is GRPO with a few settings changed. `grpo-no-kl` drops the anchor, the `sage-*` rows
# shape it, and the `bnpo` and `dapo` rows change how token losses are averaged. `k3`,
# differentiated as a loss, pulls towards π_ref like the *forward* KL; the rows named after a KL say
# which gradient they really have.

# %% tags=["reproduced"]
from sage_unsloth.training.algorithms import listing

print(listing())

# %% [markdown]
# ## Train
# What is printed, in order: rows left after each filter; the plan, what it needs and whether that
# fits the card; a preflight on 32 prompts (how many are solved, in format, cut; groups whose
# completions all got one reward teach nothing); then a bar with reward and KL. Everything is in
# `metrics.jsonl` at the end of its step.

# %%
from sage_unsloth.training.recipes import run_rlvr

metrics = run_rlvr(OUT, algorithm=ALGORITHM, start=START, path=DATA_FILE, smoke=SMOKE, **SETTINGS)

# %% [markdown]
# ## See that it worked
# - The reward climbs. Flat? Look at *dead groups*: near 1, there is nothing to learn from; take
#   easier problems, more SFT, or more completions a prompt.
# - The KL starts at 0 (the run stops if it does not) and grows slowly. A jump means that the
#   learning rate is too high.
# - The loss itself says nothing: it starts near 0 and stays there, since advantages of a group sum
#   to 0.
# - Entropy that falls to 0 means the policy has stopped exploring; that is what the guide is there
#   to slow.

# %%
from IPython.display import Image

Image(OUT / "training.png")

# %% [markdown]
# What the policy wrote at the last sampled step:

# %%
from sage_unsloth.runs.files import read_jsonl

rows = read_jsonl(OUT / "completions.jsonl")
for row in [row for row in rows if row["step"] == rows[-1]["step"]][:4]:
    print(
        f"step {row['step']}  {row['grade']:<11} answer {row['answer']:<6} "
        f"{row['completion'][:300]}"
    )

# %% [markdown]
# ## Next
# Run this notebook again with another `ALGORITHM`, `"grpo"` above all, and compare them on held-out
# problems in `03_pass_at_k.ipynb`: training reward alone cannot show what was lost. To take the
# model elsewhere: `python -m sage_unsloth export runs/sage-branch --to merged`.
