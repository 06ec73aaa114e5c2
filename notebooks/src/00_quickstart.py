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
# # 00 · Quickstart: watch SAGE train, on any machine
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/00_quickstart.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/00_quickstart.ipynb)
#
# **At the end you have** a model fine-tuned on worked solutions, the same model trained by GRPO and
# by SAGE-Branch through Unsloth's own fast GRPO loss, and pass@k of all of them on held-out
# problems, with intervals.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The run in this file took the time that it
# prints below, on one of two CPU cores; on a GPU it has not been measured. Installing takes a few
# minutes and about 7 GB of disk.

# %% [markdown]
# ## Install
# Does nothing if everything is installed. Otherwise it looks at the GPU and at what the image
# brings, prints what it keeps and why, and installs the rest. If it replaced a package that the
# kernel had loaded, it asks you to restart once and run all cells again.

# %%
import importlib.util

spec = importlib.util.find_spec("sage_unsloth")
if spec is None or spec.origin is None:  # a bare folder of that name is not the package
    # %pip install -q --no-deps "lazy_loader>=0.5" "sage_unsloth @ git+https://github.com/sage-unsloth/sage_unsloth"
    pass

from sage_unsloth import hosted

hosted.install()

# %% [markdown]
# `doctor` says what this machine has, what is missing, and the remedy. Every check should begin
# with `ok` or `warn`. Without a GPU, Unsloth's own lines about xformers, bfloat16 and faster
# finetuning are harmless.

# %%
from sage_unsloth import doctor

assert doctor.run() == 0, "see the remedies above"

# %% tags=["parameters"]
RUNS = hosted.runs_folder()  # Google Drive once mounted, /kaggle/working, or "runs"
OUT = RUNS / "quickstart"  # run again: it resumes, or shows the finished report; 03 and 04 read it
SMOKE = False  # True: a minute, and only shows that everything works; its figures mean nothing

# %% [markdown]
# ## The task
# Each problem is a product, and there is more than one way to it. The usual way splits at the ten;
# the rare way rounds up and subtracts. The base model does not know the times table from 7 on, so
# for some problems only the rare way works, and those are scarce in the training set. Sharpening
# the usual way can then *lose* problems that the base model solved now and then: pass@1 rises,
# pass@k (right at least once in k tries) falls. That is the question SAGE asks.

# %% tags=["reproduced"]
from collections import Counter

from sage_unsloth import load_benchmark, load_dataset, show_table

splits = {
    "test": load_benchmark("arithmetic").rows,
    "sft": load_dataset("arithmetic", stage="sft").rows,
    "train": load_dataset("arithmetic").rows,
}
families = {split: Counter(row["family"] for row in rows) for split, rows in splits.items()}
show_table(
    [
        {"split": split} | {name: counts[name] for name in ("usual", "rare", "both", "far")}
        for split, counts in families.items()
    ]
)  # problems of each family

# %% [markdown]
# ## The trainer and the guide, once in view
# This is all that SAGE adds to a trainer: a guide, and `guided_kl` around `train`. Two steps here,
# from the base model; the quickstart below does the same for 100 steps, twice, after SFT.

# %%
from sage_unsloth import (
    BranchGuide,
    LoraSettings,
    grpo_config,
    guided_kl,
    load_policy,
    load_unsloth,
    rewards,
    train,
)

load_unsloth()  # before trl; `GRPOTrainer` below is Unsloth's
from trl import GRPOTrainer

model, tokenizer = load_policy("arithmetic-base", lora=LoraSettings(rank=8))
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=rewards(["answer"]).functions,  # 1 for a right answer, else 0
    train_dataset=load_dataset("arithmetic", tokenizer, max_tokens=64).dataset,
    args=grpo_config(
        RUNS / "two-steps",
        tokenizer,
        max_steps=2,
        per_device_train_batch_size=16,
        num_generations=8,  # completions of each problem: a group
        max_completion_length=48,
        learning_rate=2e-3,
        beta=0.05,  # of the KL, which the guide shapes
    ),
)
guide = BranchGuide(ratio=0.3, threshold=1.2)  # q = 1 + 0.3 · max(0, entropy − 1.2)
with guided_kl(trainer, guide):  # the KL now pulls to q·π_ref instead of π_ref
    steps = train(trainer, RUNS / "two-steps")
show_table([{name: row[name] for name in ("step", "reward", "kl/ref_k3")} for row in steps])

# %% [markdown]
# ## Train and evaluate
# SFT on worked solutions teaches the format. GRPO and SAGE-Branch then start from the same model,
# with the same problems, seeds and settings; they differ in the KL anchor alone, which SAGE-Branch
# multiplies by $q_t = 1 + 0.3 \max(0, H_t - 1.2)$, $H_t$ being the entropy before token $t$.

# %%
from sage_unsloth import quickstart

config = quickstart.smoke_config() if SMOKE else quickstart.QuickstartConfig()
report = quickstart.run(OUT, config)
print("\nSeconds spent:", report["seconds_this_time"])

# %% [markdown]
# ## See that it worked
# - The reward climbs for both. If it stays flat, look at `metrics.jsonl` for
#   `frac_reward_zero_std`: a group whose completions all got the same reward has zero advantage.
# - The KL starts at 0: the reference is the SFT model itself.
# - The guide of SAGE-Branch is above 1. GRPO has none; its entropy is logged by the same code.

# %%
from IPython.display import Image

Image(OUT / "training.png")

# %% [markdown]
# ## pass@k
# Bands are 95 % intervals over problems. Two curves whose bands overlap may still differ,
# because both models answered the same problems: the paired differences in the table above are the
# test.
#
# **One run, one training seed. Over eight seeds SAGE-Branch and GRPO do not differ: +.000 [−.002,
# +.002] at pass@1 and −.001 [−.014, +.012] at pass@32 ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).
# What one run shows beyond that is luck.**

# %%
Image(OUT / "pass_at_k.png")

# %% [markdown]
# ## What the models wrote
# The `rare` problem that SFT solved most often: each model's first samples, its first right one,
# and how many are right.

# %%
import json

folder = OUT / "samples"
files = {name: folder / f"{name.lower()}.jsonl" for name in quickstart.MODELS}
records = {
    name: [json.loads(line) for line in file.read_text().splitlines()]
    for name, file in files.items()
}
solved = Counter({r["problem_id"]: 0 for r in records["SFT"]})
solved.update(r["problem_id"] for r in records["SFT"] if r["grade"] == "correct")
rare = [row for row in splits["test"] if row["family"] == "rare" and row["id"] in solved]
problem = max(rare, key=lambda row: solved[row["id"]])
print(problem["problem"], " right answer:", problem["answer"])

# %%
for name in quickstart.MODELS:
    samples = [record for record in records[name] if record["problem_id"] == problem["id"]]
    right = [sample for sample in samples if sample["grade"] == "correct"]
    print(f"{name}: {len(right)} of {len(samples)} right")
    for sample in samples[:2] + right[:1]:
        print(f"  {sample['grade']:<11} {sample['completion']}")

# %% [markdown]
# ## Next
# - Your own questions, on a free T4 or here: [notebook 06](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/06_your_own_questions.ipynb).
# - The same models with every problem's samples: [notebook 03](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb)
#   and [notebook 04](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/04_analysis.ipynb).
# - Your own guide is any object with a method `log_guide` and a set `needs`
#   ([a page](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/guides.md#your-own-guide)).
# - The same run as a command: `python -m sage_unsloth quickstart --out runs/quickstart`.
