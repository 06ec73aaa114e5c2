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
# # 04 · What a trained model does differently, and where the guide acts
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/04_analysis.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/04_analysis.ipynb)
#
# **At the end you have**, from the files that a run left: how often each way of reasoning shows in
# correct solutions, the course of training in thirds, solutions of SFT, GRPO and SAGE beside each
# other, how improbable their responses are under the SFT model, and one page on which you can point
# at a token and read what the guide made of it.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The time of the run in this file, on one of
# two CPU cores, is printed at its end; on a GPU it has not been measured. It reads what
# notebook 00 left in the runs folder; without that it trains the same small models first, about six
# minutes.

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

# %%
from sage_unsloth import doctor

assert doctor.run() == 0, "see the remedies above"

# %% tags=["parameters"]
# Google Drive on Colab once mounted, /kaggle/working on Kaggle, "runs" elsewhere
RUNS = hosted.runs_folder()
TRAINED = RUNS / "quickstart"  # the folder of notebook 00
OUT = RUNS / "analysis"  # a second run with the same folder scores only what is missing
AGAINST = "GRPO"  # the model that the others are compared with
RESPONSES = 64  # of each problem and model that are scored for perplexity; the paper has 64
SMOKE = False  # True: seconds, and only shows that everything works; its figures mean nothing

# %%
import time

from sage_unsloth import analysis, quickstart

started = time.perf_counter()
if not (TRAINED / "report.json").exists():
    quickstart.run(TRAINED, quickstart.smoke_config() if SMOKE else None)
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## What is there
# `find_sources` looks for training logs and graded samples in any folders: of a quickstart, of
# `train`, of `evaluate`. Nothing below looks at anything else until perplexity, which needs a
# model.

# %%
sources = analysis.find_sources([TRAINED])
samples = sources.samples["arithmetic"]
problems = analysis.problem_texts("arithmetic", sources)
print("training logs:", ", ".join(sources.runs))
print("graded samples:", {name: len(records) for name, records in samples.items()})

# %% [markdown]
# ## Ways of reasoning (Eq. 13)
# Of each problem's *correct* solutions, the share that shows a pattern; then the mean over
# problems. A pattern is a name and one or more regular expressions. These are the paper's:

# %% tags=["reproduced"]
from sage_unsloth import analysis

for name, expressions in analysis.PATTERNS.items():
    print(f"{name}\n    " + "\n    ".join(expressions))

# %% [markdown]
# The embedded task has no words, but it has ways: the usual split at the ten, and rounding up,
# which is rare and the only one that solves the `rare` problems. Add your own to the dict in the
# same form.

# %%
from IPython.display import HTML, Image, display

from sage_unsloth import show_table

patterns = analysis.ARITHMETIC_PATTERNS
frequencies = analysis.pattern_frequencies(samples, patterns)
show_table(analysis.pattern_rows(frequencies))
note = "embedded arithmetic; 95 % over problems with a correct solution"
Image(analysis.plot_patterns(frequencies, OUT / "patterns.png", note))

# %% [markdown]
# **Read the counts first.** A frequency rests on the problems that *this* model solves, so two
# models' frequencies are about different problems: one that begins to solve `rare` problems rounds
# up more often even if it solves every other problem as before. The paired differences below keep
# to the problems that both solve. They answer another question, and often give another number.

# %%
from sage_unsloth import evaluation

show_table(
    [
        row | {"difference": evaluation.interval_text(row["difference"], "+")}
        for row in analysis.pattern_differences(samples, patterns, AGAINST)
    ]
)

# %% [markdown]
# ## The course of training
# Thirds of the optimizer steps, each with a 95 % interval from blocks of neighbouring steps. It
# says how well the mean of *this* run's steps is known, and nothing about another seed. A *dead
# group* is one whose completions all got the same reward: its advantages are zero, and with it the
# gradient falls. The KL to q·π_ref is a generalised one, so only the KL to π_ref compares two runs.

# %%
from sage_unsloth import training

runs = {name: training.read_metrics(folder) for name, folder in sources.runs.items()}
show_table(analysis.phase_rows(analysis.dynamics(runs)))

# %%
note = "thin: each step, thick: moving average over 9; bands: 95 % over problems"
curves = analysis.pass_at_k_curves("arithmetic", samples)
Image(analysis.plot_dynamics(runs, curves, OUT / "dynamics.png", note))

# %% [markdown]
# **One run, one training seed. Over eight seeds SAGE-Branch and GRPO do not differ: +.000 [−.002,
# +.002] at pass@1 and −.001 [−.014, +.012] at pass@32 ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).
# What one run shows beyond that is luck.**
#
# Training reward is pass@1 on the training problems. It says nothing about pass@k: compare the
# first two panels.
#
# ## Case studies
# Picked by a rule and not by hand: the problems on which the two models differ most in how many
# samples are right, and of each model the first right and the first wrong sample.

# %%
other = list(samples)[-1]
cases = analysis.case_studies(samples, other, AGAINST, 4, problems)
rule = analysis.CASE_RULE.format(a=other, b=AGAINST)
print(rule)
(OUT / "cases.html").write_text(analysis.case_page(cases, "Case studies", rule), encoding="utf-8")
display(HTML("".join(analysis.case_table(case) for case in cases)))

# %% [markdown]
# ## Perplexity under the SFT model (Eq. 39)
# How improbable is what a model writes now to the model that it started from? RL that only sharpens
# keeps to the responses that were probable before: the right tail of its perplexities is cut off.
# Scores are on disk after each batch.

# %%
from tqdm.auto import tqdm

baseline, tokenizer = analysis.load_scorer(TRAINED / "sft" / "model")
settings = {"baseline": f"{TRAINED}/sft/model"}
chosen = {name: [r for r in rows if r["sample"] < RESPONSES] for name, rows in samples.items()}
with tqdm(total=sum(map(len, chosen.values())), unit="response") as bar:
    scores = {
        name: analysis.score_records(
            baseline,
            tokenizer,
            rows,
            problems,
            OUT / "perplexity" / f"{name}.jsonl",
            settings=settings | {"set": sources.settings["arithmetic", name]},
            bar=bar,
        )
        for name, rows in chosen.items()
    }

# %%
show_table(analysis.perplexity_rows(analysis.perplexity_table(scores, AGAINST)))

# %%
values = {name: analysis.perplexities(rows) for name, rows in scores.items()}
titles = {case.problem_id: case.problem for case in cases}
note = (
    f"baseline: the SFT model; {RESPONSES} responses of each model; the problems of the case "
    f"studies"
)
Image(analysis.plot_perplexity(values, titles, OUT / "perplexity.png", note))

# %% [markdown]
# ## Where the guide acts
# One completion of every problem (the first right one, else the first), scored once more under the
# trained policy and its reference, and given to the guide that the run had, which is read from its
# `run.json`. A working has four steps; the first one is the choice of the way.

# %%
everything = analysis.case_studies(samples, other, AGAINST, len(problems), problems)
found = list(analysis.run_traces(other, sources.runs[other], everything, problems))
traces, guide = [trace for trace, _ in found], found[0][1]
STEPS = ("the split: choice of the way", "first product", "second product", "sum, answer and end")
by_step = {step: [] for step in STEPS}
for trace in traces:
    for place, values in enumerate(zip(trace.entropies, trace.log_guides, strict=True)):
        by_step[STEPS[min("".join(trace.tokens[:place]).count(";"), 3)]].append(values)

# %%
print(guide)
show_table(
    [
        {
            "step": step,
            "tokens": len(values),
            "with q ≠ 1": sum(q != 0 for _, q in values),
            "mean entropy": f"{sum(h for h, _ in values) / max(1, len(values)):.3f}",
            "largest entropy": f"{max((h for h, _ in values), default=0):.3f}",
        }
        for step, values in by_step.items()
    ]
)

# %% [markdown]
# So look whether the guide is where the ways part. At the end of the run in this file it is not:
# the entropy of that choice is below the threshold, and every token that the guide touches lies
# inside a product. There the anchor holds the policy closer to the reference, and per token that is
# all that Branch does: its q does not depend on which token comes next.
#
# The completion that the guide changes most, of all problems, as a figure. Bars below are log q:
# where there is none, q is 1 and the KL is GRPO's own.

# %%
most = max(traces, key=lambda trace: sum(map(abs, trace.log_guides)))
touched = sum(q != 0 for q in most.log_guides)
print(f"{most.problem}: the guide touches {touched} of {len(most.tokens)} tokens")
Image(analysis.plot_trace(most, OUT / "tokens.png", repr(guide), guide.threshold))

# %% [markdown]
# And this one with those of the case studies as a page to point at, `tokens.html` in the folder:
# one file that loads nothing and follows your system's dark or light.

# %%
shown = [most, *(trace for trace in traces[: len(cases)] if trace is not most)]
page = analysis.trace_page(shown, "Where the guide acts, token by token")
print("written,", (OUT / "tokens.html").write_text(page, encoding="utf-8"), "characters")

# %%
print(f"{time.perf_counter() - started:.0f} s for this notebook, this time")

# %% [markdown]
# ## Next
# - The same from the command line, on any runs: `python -m sage_unsloth analyze runs/quickstart
#   --perplexity runs/quickstart/sft/model --page`.
# - Your own patterns: `--pattern "checks its answer=let me (check|verify)"`.
