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
# # 03 · pass@k that you can trust: base, SFT, GRPO and SAGE
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb)
#
# **At the end you have** pass@k of four models on the same problems with intervals, their paired
# differences, and the problems that only one of them solves. You will also know what an interval
# says and what it does not.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The run shown here prints its time below; on a
# GPU it has not been measured. The notebook uses the models of notebook 00, or trains them first if
# the runs folder does not have them, which takes about six minutes.

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

# %%
from sage_unsloth import doctor

assert doctor.run_checks() == 0, "see the remedies above"

# %% tags=["parameters"]
# Google Drive on Colab once mounted, /kaggle/working on Kaggle, "runs" elsewhere
RUNS = hosted.runs_folder()
OUT = RUNS / "evaluation"  # a second run with the same folder draws only what is missing
# What notebooks 01 and 02 left, for example ["SFT=runs/sft/model",
# "SAGE=runs/sft/model+runs/sage-branch/adapter"]. None takes the models of notebook 00, and trains
# them if they are not there.
MODELS = None
TRAINED = RUNS / "quickstart"  # the folder of notebook 00
BENCHMARKS = ["arithmetic"]  # "aime", "amc23", "math500-l5" and so on, or "NAME=FILE"
SAMPLES = 64  # n: pass@k is known up to k = n; the paper has 256
# {} is the paper's: temperature 0.3, min-p 0.01, 1,024 tokens
SAMPLING = {"temperature": 1.0, "min_p": 0.0, "max_completion_length": 48, "batch_size": 512}
PROBLEMS = None  # only the first so many of each benchmark
SMOKE = False  # True: seconds, and only checks that everything works; its figures mean nothing

# %% [markdown]
# ## The models
# A model is written as `NAME=PATH` or `NAME=PATH+ADAPTER`. If the quickstart has already run, it is
# not trained again.

# %%
from sage_unsloth import quickstart

if MODELS is None:
    quickstart.run(TRAINED, quickstart.smoke_config() if SMOKE else None)
    MODELS = [
        f"base={quickstart.BASE_MODEL}",
        f"SFT={TRAINED}/sft/model",
        f"GRPO={TRAINED}/sft/model+{TRAINED}/grpo/adapter",
        f"SAGE-Branch={TRAINED}/sft/model+{TRAINED}/sage-branch/adapter",
    ]

# %% [markdown]
# ## The problems
# `load_benchmark` knows `aime`, `amc23`, `math500-l5`, `minerva`, `knights-and-knaves:3`,
# `reasoning-gym:TASK` and more, from the hub or from a file; a file of your own works the same way.
# Here we use the held-out problems of the embedded arithmetic task. Is any of them also in the
# training set?

# %%
from sage_unsloth import load_benchmark, load_dataset

trained_on = load_dataset("arithmetic").rows + load_dataset("arithmetic", stage="sft").rows
for name in BENCHMARKS:
    problems = [row["problem"] for row in load_benchmark(name).rows[:PROBLEMS]]
    copies = {row["problem"] for row in trained_on} & {*problems}
    print(f"{name}: {len(problems)} problems, {len(copies)} of them in the training set")

# %% [markdown]
# ## Step by step: two models
# **Sample.** The prompt is the training prompt. Every completion has its own random stream, which
# depends only on the problem and the number of the sample, so two models answer a problem with the
# same random numbers. Completions are saved batch by batch.

# %%
import json

from sage_unsloth import evaluate

n = min(8, SAMPLES)
few = {"num_samples": n} | SAMPLING
evaluate(MODELS[-2:], BENCHMARKS[:1], OUT / "steps", problems=PROBLEMS, **few)
samples = OUT / "steps" / "samples" / BENCHMARKS[0].partition("=")[0]
records = {
    file.stem: [json.loads(line) for line in file.read_text().splitlines()]
    for file in sorted(samples.glob("*.jsonl"))
}

# %% [markdown]
# **Grade.** Each record has the extracted answer, the reference answer (the *gold*) and the grade.
# So you can inspect a grade, and grade again with better rules without sampling again.

# %%
shown = ("problem_id", "sample", "completion", "extracted", "gold", "grade")
for name, found in records.items():
    print(name, {field: found[0][field] for field in shown}, sep="\n")

# %% [markdown]
# **Count.** If c of the n samples of a problem are correct, pass@k = 1 − C(n−c, k) / C(n, k) is the
# probability that k of these samples, chosen at random, include a correct one:

# %%
from collections import Counter
from math import comb

import numpy as np

from sage_unsloth import pass_at_k

k = min(4, n)
names = list(dict.fromkeys(record["problem_id"] for found in records.values() for record in found))
counts = {}
for model, found in records.items():
    right = Counter(record["problem_id"] for record in found if record["grade"] == "correct")
    counts[model] = c = np.array([right[name] for name in names])
    print(
        f"{model}: {c[0]} of {n} right on {names[0]}, so pass@{k} there is "
        f"{1 - comb(n - c[0], k) / comb(n, k):.3f}, and {pass_at_k(n, c, k).mean():.3f} over all"
    )

# %% [markdown]
# **Compare.** Both models answered the same problems, so what makes a problem hard for both cancels
# in the difference. Look at the interval of the difference:

# %%
from sage_unsloth import evaluation

(first, a), (second, b) = counts.items()
for name, c in counts.items():
    found = evaluation.pass_at_k_interval(n, c, k)
    print(f"{name:12} pass@{k} {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]")
found = evaluation.paired_difference(n, b, n, a, k)
print(f"{second} - {first}: {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]")

# %% [markdown]
# ## All models in one call
# `evaluate` does this for every model, benchmark and k. You can stop this cell at any time: the
# next run samples what is missing. If you ask for more samples later, they are added to these.

# %%
import time

started = time.perf_counter()
report = evaluate(
    MODELS,
    BENCHMARKS,
    OUT,
    problems=PROBLEMS,
    against=MODELS[len(MODELS) // 2].partition("=")[0],
    num_samples=SAMPLES,
    **SAMPLING,
)
print(f"{time.perf_counter() - started:.0f} s this time\n")
print(report)

# %% [markdown]
# ## See that it worked
# - `no answer` is the share of completions without a tag or a box, and `cut` the share that reached
#   the length limit. If either is large, pass@k measures the format or the limit, not the model's
#   skill.
# - Some of the base model's answers have no tag: SFT mostly teaches the format.

# %%
from IPython.display import Image

Image(OUT / "pass_at_k.png")

# %% [markdown]
# ## How to read an interval
# The test problems are a sample of all *problems of this kind*. If you repeated the evaluation 100
# times with new problems, about 95 of the bands would contain the mean over all such problems. The
# band is wide because 100 problems are few; more samples per problem hardly make it narrower. The
# `±` in the table is something else: the spread over five parts of the samples on *these* problems,
# as papers print it over evaluation seeds. It is much smaller, and it says nothing about other
# problems:

# %%
from sage_unsloth import show_table

show_table(
    [
        {
            "model": row["model"],
            "half of the interval": round((row["pass@1_high"] - row["pass@1_low"]) / 2, 3),
            "± over five parts": row.get("seed_deviation", "too few samples"),
        }
        for row in report["table"]
    ]
)

# %% [markdown]
# ## Differences
# If bands overlap, the two models may still differ: both answered the same problems, and what makes
# a problem hard for both cancels in the difference. So check whether the band of the difference
# contains 0. `above 0` is the share of the difference's t distribution that favours the first
# model. All of this is about these two trained models; with another training seed you get other
# models. To compare methods, train several seeds of each and give them one name, `--models grpo=…
# grpo=… sage=… sage=…`; the intervals then hold for other seeds too.
#
# **This is one run with one training seed. Over eight seeds SAGE-Branch and GRPO do not differ:
# +.000 [−.002, +.002] at pass@1 and −.001 [−.014, +.012] at pass@32
# ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).
# Any larger difference in one run is luck.**

# %%
Image(OUT / "differences.png")

# %% [markdown]
# ## Coverage
# These problems were solved at least once by one model only. A problem that is solved once in 64
# samples may be luck, so look here for examples, and trust the curves.

# %%
for benchmark, coverage in report["coverage"].items():
    for name, only in coverage["only"].items():
        solved = coverage["solved"][name]
        print(f"{benchmark}, {name}: solved {solved}, alone {len(only)}: {', '.join(only[:6])}")

# %% [markdown]
# ## Is one method better than another?
# Two models cannot answer this, because another training seed gives other models. `study` trains
# each method with several seeds, each run in its own process, and reports which differences are
# more than luck. Here it runs two methods, two seeds and two steps, so it only shows what a report
# looks like. For a real answer use `--seeds 4` and your own `--data`
# ([study](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/study.md)). A second call
# resumes, or prints the report again.

# %%
from sage_unsloth import study

found = study.study(
    OUT.parent / "study",
    task="arithmetic",
    methods=["grpo=0.05", "maxrl=0.05"],
    claims=["maxrl=0.05>grpo=0.05@4"],
    seeds=2,
    free=[],
    smoke=True,
)

# %% [markdown]
# The report is also available as data, with every difference, its interval and its verdict.

# %%
for name, row in found["sets"]["test"]["points"].items():
    for k, difference in row["to_baseline"].items():
        interval = f"[{difference['low']:+.2f}, {difference['high']:+.2f}]"
        print(f"{name}, pass@{k} minus the baseline: {difference['mean']:+.2f} {interval}")

# %% [markdown]
# ## Next
# - The same from the command line: `python -m sage_unsloth evaluate --models sft=PATH
#   grpo=PATH+ADAPTER --benchmarks math500-l5 aime --n 256 --max-tokens 1024`. On a GPU with vLLM
#   the base is loaded once for all adapters.
# - `python -m sage_unsloth compare FOLDER FOLDER` reports on existing records, also from other runs
#   or other machines.
