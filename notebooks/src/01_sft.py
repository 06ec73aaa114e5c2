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
# # 01 · SFT: teach the format before rewarding it
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/01_sft.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/01_sft.ipynb)
#
# **At the end you have** an adapter and a merged model that work inside `<start_working_out>` …
# `<SOLUTION>` and end there, a table of how many completions are in that format before and after,
# and the command of the next stage.
#
# **Cost.** Qwen2.5-Math-7B on OpenMathReasoning-mini, one GPU of 24 GB or more (16 GB in 4 bit, by
# arithmetic): time and memory **not measured**, no GPU has run this yet. The run in this file is
# the embedded model on a CPU: the time is printed below.
#
# If the runtime disconnects, run all cells again: training resumes from the last checkpoint.

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
# Without a GPU the embedded model is trained, which takes a minute; with one, Qwen2.5-Math-7B.
# `OUT` is below the place that this machine keeps: Google Drive on Colab once you mount it (`from
# google.colab import drive; drive.mount("/content/drive")`), `/kaggle/working` on Kaggle, `runs`
# elsewhere.

# %% tags=["parameters"]
from sage_unsloth.models.device import has_gpu
from sage_unsloth.runs.record import runs_folder

MODEL = "qwen2.5-math-7b" if has_gpu() else "arithmetic-base"  # a preset, a folder or a hub id
# a local copy of OpenMathReasoning-mini (.jsonl, .json, .parquet) where the hub is out of reach
DATA_FILE = None
OUT = runs_folder() / "sft"  # a second run with the same folder resumes, or shows the finished run
SMOKE = False  # True: seconds, and only shows that everything works
SETTINGS = {}  # fields of SftConfig, such as {"max_length": 1024, "load_in_4bit": True}

# %% [markdown]
# ## Train
# Rows are kept where the answer is a number, the prompt is at most half of `max_length`, and the
# whole row fits, its end-of-sequence token included: a model that never saw the end of a solution
# never ends one. The table counts what each filter leaves.

# %%
from sage_unsloth.training.recipes import run_sft

table = run_sft(OUT, model=MODEL, path=DATA_FILE, smoke=SMOKE, **SETTINGS)

# %% [markdown]
# ## See that it worked
# - *In format* should be near 1 after SFT: what is not in the solution tag cannot be rewarded.
# - *Right* should be neither 0 nor 1: RL learns from problems that are solved sometimes.
# - *Cut* completions never ended. If there are many, the rows are too long for `max_length`, or
#   there were too few of them.

# %%
import matplotlib.pyplot as plt

from sage_unsloth.training.stage import read_metrics

steps = read_metrics(OUT)
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot([row["step"] for row in steps], [row["loss"] for row in steps], color="#0072B2")
axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="SFT")
axis.grid(alpha=0.25)
figure.savefig(OUT / "training.png", dpi=130)

# %% [markdown]
# The same held-out problem before and after:

# %%
from sage_unsloth.runs.files import read_jsonl

for name in ("before", "after"):
    first = read_jsonl(OUT / "held-out" / f"{name}.jsonl")[0]
    print(f"{name} SFT ({first['grade']}, answer {first['gold']}): {first['completion'][:400]}\n")

# %% [markdown]
# ## Next
# `02_rlvr.ipynb` trains on from here, by any algorithm of the table; from the command line,
# `python -m sage_unsloth train --algorithm sage-branch --from runs/sft --out runs/sage-branch`. To
# take the model elsewhere: `python -m sage_unsloth export runs/sft --to merged`.
