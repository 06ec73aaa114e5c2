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
# **At the end you have**, from the files of a run: how often each way of reasoning appears in
# correct solutions, the training curves in thirds, solutions of SFT, GRPO and SAGE next to each
# other, how improbable their responses are under the SFT model, and a page that shows for each
# token what the guide did to it.
#
# **Cost.** No GPU, no account, about 2 GB of memory. The run shown here used one of two CPU cores
# and prints its time at the end; on a GPU it has not been measured. The notebook uses the runs of
# notebook 00, or trains them first if the runs folder does not have them, which takes about six
# minutes.

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
TRAINED = RUNS / "quickstart"  # the folder of notebook 00
OUT = RUNS / "analysis"  # a second run with the same folder scores only what is missing
AGAINST = "GRPO"  # the model that the others are compared with
RESPONSES = 64  # of each problem and model that are scored for perplexity; the paper has 64
SMOKE = False  # True: seconds, and only checks that everything works; its figures mean nothing

# %%
import time

from sage_unsloth import analysis, quickstart

started = time.perf_counter()
if not (TRAINED / "report.json").exists():
    quickstart.run(TRAINED, quickstart.smoke_config() if SMOKE else None)
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Find the runs
# `find_sources` looks for training logs and graded samples in the folders that `quickstart`,
# `train` and `evaluate` wrote. The cells below use only these files, except perplexity and the
# guide, which load a model.

# %%
sources = analysis.find_sources([TRAINED])
samples = sources.samples["arithmetic"]
problems = analysis.problem_texts("arithmetic", sources)
print("training logs:", ", ".join(sources.runs))
print("graded samples:", {name: len(records) for name, records in samples.items()})

# %% [markdown]
# ## Ways of reasoning (Eq. 13)
# For each problem, this computes the share of *correct* solutions that show a pattern, and then the
# mean over problems. A pattern is a name with one or more regular expressions. These are the
# paper's:

# %% tags=["reproduced"]
from sage_unsloth import analysis

for name, expressions in analysis.PATTERNS.items():
    print(f"{name}\n    " + "\n    ".join(expressions))

# %% [markdown]
# The embedded task has no words, but it has two ways to solve a problem: the usual split at the
# tens, and rounding up, which is rare and the only one that solves the `rare` problems. Add your
# own patterns to the dict in the same form.

# %%
from IPython.display import HTML, Image, display

from sage_unsloth import show_table

patterns = analysis.ARITHMETIC_PATTERNS
frequencies = analysis.pattern_frequencies(samples, patterns)
show_table(analysis.pattern_rows(frequencies))
note = "embedded arithmetic; 95 % over problems with a correct solution"
Image(analysis.plot_patterns(frequencies, OUT / "patterns.png", note))

# %% [markdown]
# **Read the counts first.** A frequency is a mean over the problems that *this* model solves, so
# two models' frequencies are about different problems. A model that begins to solve `rare` problems
# rounds up more often, even if it solves every other problem as before. The paired differences
# below use only the problems that both models solve. They answer a different question, and often
# give a different number.

# %%
from sage_unsloth import evaluation

show_table(
    [
        row | {"difference": evaluation.interval_text(row["difference"], "+")}
        for row in analysis.pattern_differences(samples, patterns, AGAINST)
    ]
)

# %% [markdown]
# ## Training in thirds
# The optimizer steps are split into thirds, each with a 95 % interval from blocks of neighbouring
# steps. The interval says how well the mean of *this* run's steps is known, and nothing about
# another seed. In a *dead group* all completions have the same reward, so it adds nothing to the
# gradient. The KL to q·π_ref is a generalised KL, so compare runs only by the KL to π_ref.

# %%
from sage_unsloth import training

runs = {name: training.read_metrics(folder) for name, folder in sources.runs.items()}
show_table(analysis.phase_rows(analysis.dynamics(runs)))

# %%
note = "thin: each step, thick: moving average over 9; bands: 95 % over problems"
curves = analysis.pass_at_k_curves("arithmetic", samples)
Image(analysis.plot_dynamics(runs, curves, OUT / "dynamics.png", note))

# %% [markdown]
# **This is one run with one training seed. Over eight seeds SAGE-Branch and GRPO do not differ:
# +.000 [−.002, +.002] at pass@1 and −.001 [−.014, +.012] at pass@32
# ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).
# Any larger difference in one run is luck.**
#
# The training reward is pass@1 on the training problems. It says nothing about pass@k, as the first
# two panels show.
#
# ## Case studies
# These are chosen by a rule, not by hand: the problems on which the two models differ most in the
# number of correct samples, with each model's first correct and first wrong sample.

# %%
other = list(samples)[-1]
cases = analysis.case_studies(samples, other, AGAINST, 4, problems)
rule = analysis.CASE_RULE.format(a=other, b=AGAINST)
print(rule)
(OUT / "cases.html").write_text(analysis.case_page(cases, "Case studies", rule), encoding="utf-8")
display(HTML("".join(analysis.case_table(case) for case in cases)))

# %% [markdown]
# ## Perplexity under the SFT model (Eq. 39)
# How improbable are a model's responses under the model that it started from? If RL only sharpens
# the model, it keeps to responses that were already probable, and high perplexities become rare.
# Scores are saved after each batch.

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
# We take one completion of every problem (the first correct one, or else the first), score it under
# the trained policy and its reference, and apply the run's guide, which is read from `run.json`.
# The reasoning has four steps; the first one chooses the way to solve the problem.

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
# So does the guide act at this choice? At the end of the run shown here it does not: the entropy of
# the choice is below the threshold, and every token that the guide changes is inside a product.
# There it holds the policy closer to the reference. Per token that is all that Branch does, since
# its q does not depend on which token comes next.
#
# This figure shows the completion that the guide changes most. The bars below are log q. Without a
# bar, q is 1 and the penalty is the same as in GRPO.

# %%
most = max(traces, key=lambda trace: sum(map(abs, trace.log_guides)))
touched = sum(q != 0 for q in most.log_guides)
print(f"{most.problem}: the guide touches {touched} of {len(most.tokens)} tokens")
Image(analysis.plot_trace(most, OUT / "tokens.png", repr(guide), guide.threshold))

# %% [markdown]
# `tokens.html` in the same folder shows this completion and those of the case studies, with values
# when you point at a token. It is a single file that loads nothing and follows your system's light
# or dark mode.

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
