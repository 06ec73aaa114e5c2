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
# # 06 · Your own questions on a free T4
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/06_your_own_questions.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/06_your_own_questions.ipynb)
#
# **At the end you have** a small model trained on your questions with GRPO, once with a guide and
# once without, and its pass@k on unseen questions before and after. You can ask it anything you
# type, and download it.
#
# **Cost.** By calculation a free T4 is enough; time and memory there were **not measured**, and no
# GPU has run this yet. Without a GPU the embedded arithmetic model does the same in about
# seven minutes, as in the outputs shown here (23 November 2026, two cores beside other work).
#
# If the runtime disconnects, run all cells again: training resumes from the last checkpoint.

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

hosted.install(vllm=True)  # with vLLM where it runs

# %%
from sage_unsloth import doctor

assert doctor.run_checks() == 0, "see the remedies above"

# %% [markdown]
# ## What this GPU can train
# The first of these models that fits your GPU in 16 bits is used, or else in 4 bits. All are
# trained with an adapter (LoRA), so a T4 is enough. Put the model that you prefer first.

# %%
from sage_unsloth import plan_for_card

card = plan_for_card("qwen3-1.7b", "llama-3.2-1b-instruct", "qwen3-0.6b")
card

# %% tags=["parameters"]
GPU = card.gpu
RUNS = hosted.runs_folder()  # Google Drive once mounted, /kaggle/working, or "runs"
OUT = RUNS / "own-questions"
DATA = "openai/gsm8k:main" if GPU else "arithmetic"  # or your file
COLUMNS = None  # of your file: {"problem": "question", "answer": "total", "solution": "working"}
ANSWER_PATTERN = "#### (.+)" if GPU else None  # where the answer is in a longer text
HELD_OUT = 50  # questions that are kept for the test
SFT_STEPS = 40  # to teach the format, if it is missing
STEPS = 150 if GPU else 40  # of RL: enough to see the reward move
PROMPTS_PER_STEP, NUM_GENERATIONS = (1, 8) if GPU else (8, 8)  # questions, answers to each
LEARNING_RATE = 5e-6 if GPU else 2e-3
SAMPLES = 8 if GPU else 16  # answers to each test question
SHOW_EVERY = 20  # steps between samples that are printed
SEED = 3407

# %% [markdown]
# ## Your questions
# All you need is a file with a question and its answer in each line. This cell writes an example;
# to use it, set `DATA = OUT / "mine.jsonl"` above. A `solution`, the reasoning in words, is needed
# only to teach the format.

# %%
import json

mine = [
    {"problem": "A box holds 6 eggs. How many eggs are in 7 boxes?", "answer": "42"},
    {"problem": "A train takes 35 minutes. How many do 3 trips take?", "answer": "105"},
]
OUT.mkdir(parents=True, exist_ok=True)
with (OUT / "mine.jsonl").open("w") as file:
    print(*map(json.dumps, mine), sep="\n", file=file)

# %%
from sage_unsloth import load_dataset

columns = {"columns": COLUMNS, "answer_pattern": ANSWER_PATTERN}
data = load_dataset(str(DATA), held_out=HELD_OUT, limit=2000, **columns)
files = {"train": data.rows, "test": data.held_out}
for name, rows in files.items():
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
print(data.rows[0]["problem"], "->", data.rows[0]["answer"])
data

# %% [markdown]
# ## Before
# This evaluates the untrained model on the test questions. Look at `no answer`: an answer outside
# the solution tag cannot be rewarded.

# %%
from sage_unsloth import evaluate

test = [f"test={OUT / 'test.jsonl'}"]
sampling = {
    "num_samples": SAMPLES,
    "temperature": 1.0,
    "min_p": 0.0,
    "max_completion_length": card.max_completion,
    "batch_size": 32 if GPU else 256,
}
before = evaluate([f"before={card.model}"], test, OUT / "before", **sampling)
print(before)

# %% [markdown]
# ## Teach the format, if it is missing
# This trains a few steps of SFT on worked solutions. They should teach the format, not knowledge,
# so keep them short. Without a `solution` in your file this step is not possible; then use a model
# that follows the system prompt.

# %%
from sage_unsloth import training

start = card.model
if before["table"][0]["unparsable"] > 0.1:
    solved = load_dataset(str(DATA), stage="sft", **columns).rows
    kept = {row["problem"] for row in data.held_out}  # the test stays unseen
    solved = [row for row in solved if row["problem"] not in kept]
    (OUT / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
    training.run_sft(
        OUT / "sft",
        model=start,
        data=str(OUT / "solved.jsonl"),
        held_out=0,
        max_steps=SFT_STEPS,
        load_in_4bit=card.load_in_4bit,
    )
    start = OUT / "sft"

# %% [markdown]
# ## Rewards, step by step
# A reward is a function from completions to numbers. Try it on strings before you train with it,
# because the model will do whatever it rewards.
#
# 1. `"answer"` is 1 for the correct answer in the solution tag, otherwise 0. Often this is all you
#    need.

# %%
from sage_unsloth import Reward, extract_answer, prompts, rewards

PROMPT = prompts.prompt_format(tags=["project"])
tries = {
    "right": PROMPT.solution_text("6+6=12", "12"),
    "right and long": PROMPT.solution_text("6+6=12, because " + "well, " * 30, "12"),
    "wrong": PROMPT.solution_text("6+6=13", "13"),
    "no tags": "The answer is 12.",
}


def pays(reward, text):
    """What each part of a reward gives a completion, where 12 is the right answer."""
    turns = [[{"role": "assistant", "content": text}]]
    return [function([""], turns, answer=["12"])[0] for function in reward.functions]


print({name: pays(rewards(["answer"]), text) for name, text in tries.items()})

# %% [markdown]
# 2. You can add what else you want, here brevity. It rewards only correct answers: in a group in
#    which all answers are wrong, any other reward would decide alone what is learned.


# %%
def brief(completions, answer, **columns):
    """1 - length/200 for a right answer, letter by letter."""
    texts = [turns[-1]["content"] for turns in completions]
    pairs = [(text, extract_answer(text, prompt=PROMPT)) for text in texts]
    return [
        (a == g) * (1 - min(len(t), 200) / 200) for (t, a), g in zip(pairs, answer, strict=True)
    ]


parts = ["answer", Reward(function=brief, weight=0.2)]
print({name: pays(rewards(parts), text) for name, text in tries.items()})

# %% [markdown]
# 3. A reward for being close is tempting: 13 is nearer to 12 than 40 is. Try it, and see that a
#    model can earn it without ever being correct. It is not used below.


# %%
def close(completions, answer, **columns):
    """1 / (1 + distance) where the answer is a whole number."""
    texts = [extract_answer(turns[-1]["content"], prompt=PROMPT) or "" for turns in completions]
    pairs = zip(texts, answer, strict=True)
    return [1 / (1 + abs(int(a) - int(g))) if a.isdigit() else 0.0 for a, g in pairs]


print({name: pays(rewards([close]), text) for name, text in tries.items()})
REWARDS = ["answer"]  # or `parts`

# %% [markdown]
# ## GRPO, and GRPO with a guide
# These two runs start from the same model and use the same questions. `sage-branch` differs in one
# thing: where the model is undecided, the KL penalty pulls it back to the start model more
# strongly.
#
# **What to expect.** The reward is noisy and should be visibly higher after 100 to 150 steps (30 on
# the embedded task). The KL starts at 0 and grows slowly to a few hundredths. If it jumps, lower
# `LEARNING_RATE`. If the reward stays flat, look at `dead groups` in the table below each run: a
# group that is all correct or all wrong has zero advantage, so take easier or harder questions.
# Every few steps some completions are printed; read them.

# %%
settings = {
    "start": start,
    "data": str(OUT / "train.jsonl"),
    "rewards": REWARDS,
    "max_steps": STEPS,
    "prompts_per_step": PROMPTS_PER_STEP,
    "num_generations": NUM_GENERATIONS,
    "learning_rate": LEARNING_RATE,
    "load_in_4bit": card.load_in_4bit,
    "sample_steps": SHOW_EVERY,
    "seed": SEED,
    "force": True,  # also where the first look finds little to learn from
}
watch = [training.LivePlot(), training.ShowCompletions(OUT / "grpo")]
_ = training.run_rlvr(OUT / "grpo", algorithm="grpo", callbacks=watch, **settings)
# %%
watch = [training.LivePlot(), training.ShowCompletions(OUT / "sage")]
_ = training.run_rlvr(OUT / "sage", algorithm="sage-branch", callbacks=watch, **settings)
# %% [markdown]
# ## After
# This evaluates all models on the same test questions. Read the interval of each *difference*; with
# few questions it is wide. pass@1 is how often one try is correct, and the last pass@k how often at
# least one of k tries is. RL tends to raise the first and lower the last.
#
# **This is one run with one seed.** Over eight seeds on the embedded task, GRPO and SAGE-Branch do
# not differ: +.000 [−.002, +.002] at pass@1 and −.001 [−.014, +.012] at pass@32
# ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).

# %%
models = [f"before={card.model}", f"start={start}", f"grpo={OUT / 'grpo'}", f"sage={OUT / 'sage'}"]
models = models if start != card.model else [models[0], *models[2:]]
report = evaluate(models, test, OUT / "evaluation", against="grpo", **sampling)
print(report)

# %%
from IPython.display import Image

Image(OUT / "evaluation" / "pass_at_k.png")

# %% [markdown]
# ## Ask your model

# %%
from sage_unsloth import ask

question = data.held_out[0]["problem"]  # or any text of yours
print(question)
for model in (card.model, OUT / "sage"):
    print(f"\n{model}:", *ask(model, question, max_tokens=card.max_completion))

# %% [markdown]
# ## Save your model
# You can save the adapter (small), the merged model (which any library loads), or a GGUF file for
# llama.cpp and Ollama (writing it needs a GPU). Each is checked before it is saved.

# %%
from sage_unsloth import save

files = OUT / "files"
if not (files / "adapter").exists():
    save(OUT / "sage", "adapter", files / "adapter")
    save(OUT / "sage", "merged", files / "merged")
# save(OUT / "sage", "gguf", files / "gguf", quantization="q4_k_m")
# from sage_unsloth import export
# export.push(files / "merged", "your-name/your-model")  # to the hub; needs a token
print(*sorted(str(file.relative_to(OUT)) for file in files.glob("*/*.safetensors")), sep="\n")

# %% [markdown]
# ## Next
# - See every part of the trainer: [notebook
#   02](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb).
# - Learn how to read pass@k: [notebook
#   03](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb).
# - Use other data, columns and kinds of answers: [your own
#   data](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/own_data.md).
