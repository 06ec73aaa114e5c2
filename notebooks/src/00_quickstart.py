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
# **At the end you have** three models: one fine-tuned on worked solutions (SFT), and that model
# trained further with GRPO and with SAGE-Branch, by Unsloth's own fast GRPO loss. You also have
# pass@k of all three on held-out problems, with intervals.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The run shown here used one of two CPU cores
# and prints its time below; on a GPU it has not been measured. Installing takes a few minutes and
# about 7 GB of disk.

# %% [markdown]
# ## Install
# Does nothing if everything is installed. Otherwise it checks the GPU and the packages of the
# image, prints which ones stay and why, and installs the rest. If it replaced a package that was
# already loaded, it asks you to restart the kernel once and run all cells again.

# %%
import importlib.util

spec = importlib.util.find_spec("sage_unsloth")
if spec is None or spec.origin is None:  # a bare folder of that name is not the package
    # %pip install -q --no-deps "lazy_loader>=0.5" "sage_unsloth @ git+https://github.com/sage-unsloth/sage_unsloth"
    pass

from sage_unsloth import hosted

hosted.install()

# %% [markdown]
# `doctor` lists what this machine has, what is missing and how to fix it. Every line should begin
# with `ok` or `warn`. Without a GPU, you can ignore Unsloth's own messages about xformers, bfloat16
# and faster finetuning.

# %%
from sage_unsloth import doctor

assert doctor.run_checks() == 0, "see the remedies above"

# %% tags=["parameters"]
RUNS = hosted.runs_folder()  # Google Drive once mounted, /kaggle/working, or "runs"
OUT = RUNS / "quickstart"  # run again: it resumes, or shows the finished report; 03 and 04 read it
SMOKE = False  # True: a minute, and only checks that everything works; its figures mean nothing

# %% [markdown]
# ## The task
# Each problem is a multiplication, and there is more than one way to solve it. The usual way splits
# off the tens: 18·4 = 10·4 + 8·4. The rare way rounds up and subtracts: 18·4 = 20·4 − 2·4. The base
# model does not know the times table from 7 on, so some problems can be solved only in the rare
# way, and there are few of them in the training set. If training sharpens the usual way, the model
# can *lose* problems that it used to solve now and then: pass@1 rises, and pass@k (solved at least
# once in k tries) falls. SAGE aims to prevent that.

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
# ## The trainer and the guide in a few lines
# SAGE adds only two things to a trainer: a guide, and `guided_kl` around `train`. Here you see two
# steps from the base model. The quickstart below first runs SFT and then trains 100 steps, once
# with the guide and once without.

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
# with the same problems, seeds and settings. Only the target of the KL penalty differs: SAGE-Branch
# multiplies it by $q_t = 1 + 0.3 \max(0, H_t - 1.2)$, where $H_t$ is the policy's entropy at token
# $t$.

# %%
from sage_unsloth import quickstart

config = quickstart.smoke_config() if SMOKE else quickstart.QuickstartConfig()
report = quickstart.run(OUT, config)
print("\nSeconds spent:", report["seconds_this_time"])

# %% [markdown]
# ## See that it worked
# - The reward should rise for both. If it stays flat, look at `frac_reward_zero_std` in
#   `metrics.jsonl`: if all completions of a group have the same reward, the model learns nothing
#   from it.
# - The KL starts at 0, since the reference is the SFT model itself.
# - The mean of SAGE-Branch's guide is above 1. GRPO has no guide.

# %%
from IPython.display import Image

Image(OUT / "training.png")

# %% [markdown]
# ## pass@k
# Bands are 95 % intervals over problems. Two curves may differ even if their bands overlap, because
# both models answered the same problems. Look at the paired differences in the table above instead.
#
# **This is one run with one training seed. Over eight seeds SAGE-Branch and GRPO do not differ:
# +.000 [−.002, +.002] at pass@1 and −.001 [−.014, +.012] at pass@32
# ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).
# Any larger difference in one run is luck.**

# %%
Image(OUT / "pass_at_k.png")

# %% [markdown]
# ## What the models wrote
# This is the `rare` problem that the SFT model solved most often. For each model you see the first
# samples, the first correct one, and how many are correct.

# %%
import json

folder = OUT / "samples"
files = {name: folder / f"{name.lower()}.jsonl" for name in quickstart.MODEL_NAMES}
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
for name in quickstart.MODEL_NAMES:
    samples = [record for record in records[name] if record["problem_id"] == problem["id"]]
    right = [sample for sample in samples if sample["grade"] == "correct"]
    print(f"{name}: {len(right)} of {len(samples)} right")
    for sample in samples[:2] + right[:1]:
        print(f"  {sample['grade']:<11} {sample['completion']}")

# %% [markdown]
# ## Next
# - Train on your own questions, on a free T4 or here: [notebook
#   06](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/06_your_own_questions.ipynb).
# - Look deeper into the same models: [notebook
#   03](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb) and
#   [notebook
#   04](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/04_analysis.ipynb).
# - Write your own guide, an object with a method `log_guide` and a set `needs`
#   ([guides](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/guides.md#your-own-guide)).
# - Run the same from the command line: `python -m sage_unsloth quickstart --out runs/quickstart`.
