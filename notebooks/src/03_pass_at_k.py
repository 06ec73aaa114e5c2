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
# # 03 · pass@k that can be believed: base, SFT, GRPO and SAGE
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb)
#
# **At the end you have** pass@k of four models on the same problems with intervals, their paired
# differences, the problems that only one of them solves, and an idea of what an interval does and
# does not say.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The time of the run in this file is printed
# below; on a GPU it has not been measured. It needs a finished quickstart (notebook 00); without
# one it trains that first.

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

hosted.install()

# %%
from sage_unsloth import doctor

assert doctor.run() == 0, "see the remedies above"

# %% tags=["parameters"]
from sage_unsloth.runs.record import runs_folder

# Google Drive on Colab once mounted, /kaggle/working on Kaggle, "runs" elsewhere
RUNS = runs_folder()
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
SMOKE = False  # True: seconds, and only shows that everything works; its figures mean nothing

# %% [markdown]
# ## The models
# `NAME=PATH`, or `NAME=PATH+ADAPTER`. A quickstart that is complete is only reported, not trained
# again.

# %%
from sage_unsloth import quickstart
from sage_unsloth.models.embedded import data_folder

if MODELS is None:
    quickstart.run(TRAINED, quickstart.smoke_config() if SMOKE else None)
    MODELS = [
        f"base={data_folder() / quickstart.BASE_MODEL}",
        f"SFT={TRAINED}/sft/model",
        f"GRPO={TRAINED}/sft/model+{TRAINED}/grpo/adapter",
        f"SAGE-Branch={TRAINED}/sft/model+{TRAINED}/sage-branch/adapter",
    ]

# %% [markdown]
# ## The problems
# `load_benchmark` knows `aime`, `amc23`, `math500-l5`, `minerva`, `knights-and-knaves:3`,
# `reasoning-gym:TASK` and more, from the hub or from a file; a file of your own works the same way.
# Here it is the held-out part of the embedded arithmetic. Do its problems stand in the embedded
# training set?

# %%
from sage_unsloth.evaluation.evaluator import parse_benchmark
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.overlap import overlap

benchmarks = [parse_benchmark(name, problems=PROBLEMS) for name in BENCHMARKS]
for benchmark in benchmarks:
    found = overlap(arithmetic.problems("train") + arithmetic.problems("sft"), benchmark)
    print(
        f"{benchmark.name}: {len(benchmark.rows)} problems, {len(found)} of them in the training "
        f"set"
    )

# %% [markdown]
# ## Step by step: two models
# **Draw.** The prompt is the training prompt, and every completion has a random stream of its own,
# made from the problem and the number of the sample: two models answer a problem from the same
# stream. What is drawn is on disk, batch by batch.

# %%
from dataclasses import replace

from sage_unsloth.evaluation.named_models import parse_model
from sage_unsloth.models.loading import load_policy
from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade

models = [parse_model(text) for text in MODELS]
config = SamplingConfig(num_samples=SAMPLES, **SAMPLING)
few, rows = replace(config, num_samples=min(8, SAMPLES)), benchmarks[0].rows
(OUT / "steps").mkdir(parents=True, exist_ok=True)
records = {}
for spec in models[-2:]:
    engine = TransformersEngine(*load_policy(spec.path, adapter=spec.adapter))
    file = OUT / "steps" / f"{spec.name}.jsonl"
    records[spec.name] = sample_and_grade(
        few, engine, rows, file, model=spec.name, benchmark="steps"
    )

# %% [markdown]
# **Grade.** Each record has its answer, the gold and the grade, so that a grade can be looked at,
# and changed by better rules without drawing again.

# %%
shown = ("problem_id", "sample", "completion", "extracted", "gold", "grade")
for name, found in records.items():
    print(name, {field: found[0][field] for field in shown}, sep="\n")

# %% [markdown]
# **Count.** Of the n samples of a problem c are right. pass@k = 1 − C(n−c, k) / C(n, k) is the
# chance that k samples drawn from the n include a right one:

# %%
from math import comb

from sage_unsloth import pass_at_k
from sage_unsloth.sampling.counts import correct_matrix

n, k = few.num_samples, min(4, few.num_samples)
counts = {name: correct_matrix(found).sum(1) for name, found in records.items()}
for name, c in counts.items():
    first = int(c[0])
    print(f"{name}: {first} of {n} right on {rows[0]['problem']} so pass@{k} there is", end=" ")
    print(
        f"{1 - comb(n - first, k) / comb(n, k):.3f}, and {pass_at_k(n, c, k).mean():.3f} over all"
    )

# %% [markdown]
# **Compare.** Both models answered the same problems, and what makes a problem hard for both
# cancels in the difference: the interval of the difference is what to look at.

# %%
from sage_unsloth.evaluation.metrics import paired_difference, pass_at_k_interval

(first, a), (second, b) = counts.items()
for name, c in counts.items():
    found = pass_at_k_interval(n, c, k)
    print(f"{name:12} pass@{k} {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]")
found = paired_difference(n, b, n, a, k)
print(f"{second} - {first}: {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]")

# %% [markdown]
# ## All models in one call
# The same for every model, benchmark and k. Stop this cell when you like: the next run draws what
# is missing, and more samples later are added to these.

# %%
import time

from sage_unsloth.evaluation.evaluator import choose_engine, evaluate
from sage_unsloth.evaluation.report_text import report_text

started = time.perf_counter()
report = evaluate(
    models,
    benchmarks,
    OUT,
    config,
    engine=choose_engine(),
    against=models[len(models) // 2].name,
    show=print,
)
print(f"{time.perf_counter() - started:.0f} s this time\n")
print(report_text(report))

# %% [markdown]
# ## See that it worked
# - `no answer` is the share of completions without a tag or a box, `cut` that of completions which
#   reached the length limit. If either is large, pass@k measures the format or the limit, not the
#   problems.
# - The base model has no tag in part of its answers: SFT mostly teaches the form.

# %%
from IPython.display import Image

Image(OUT / "pass_at_k.png")

# %% [markdown]
# ## How to read an interval
# The problems at hand stand for all *problems of this kind*. Of 100 evaluations, each on problems
# drawn anew, about 95 have a band that holds the mean over all of them. It is as wide as it is
# because 100 problems are few; more samples per problem hardly make it narrower. The `±` in the
# table is another thing, the spread over five parts of the samples on *these* problems, as papers
# print it over evaluation seeds. It is much smaller, and it says nothing about other problems:

# %%
from sage_unsloth.figures import show_table

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
# Bands that overlap do not mean that two models are equal: both answered the same problems, and
# what makes a problem hard for both cancels in the difference. A band of the difference that leaves
# out 0 is what to look for, and `above 0` says which share of the difference's t distribution
# favours the first model. All of it is about these two trained models: another training seed is
# another model. To compare methods, train several seeds of each and give them one name, `--models
# grpo=… grpo=… sage=… sage=…`; the intervals then hold for other seeds too.

# %%
Image(OUT / "differences.png")

# %% [markdown]
# ## Coverage
# The problems that one model alone solved at least once. At k = n a problem is one yes or no, and a
# problem solved once in 64 draws may be luck: read names here, and trust the curves.

# %%
for benchmark, coverage in report["coverage"].items():
    for name, only in coverage["only"].items():
        solved = coverage["solved"][name]
        print(f"{benchmark}, {name}: solved {solved}, alone {len(only)}: {', '.join(only[:6])}")

# %% [markdown]
# ## Next
# - The same from the command line: `python -m sage_unsloth evaluate --models sft=PATH
#   grpo=PATH+ADAPTER --benchmarks math500-l5 aime --n 256 --max-tokens 1024`. On a GPU with vLLM
#   the base is loaded once for all adapters.
# - `python -m sage_unsloth compare FOLDER FOLDER` reports on record sets that are there already, of
#   other runs or other machines.
