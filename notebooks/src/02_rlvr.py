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
# # 02 · RLVR: train with GRPO, SAGE or any other algorithm
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb)
# [![Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb)
#
# **At the end you have** a trained adapter, the metrics of every step and graded completions. You
# will also know each part that you may want to change: model, data, reward, guide, configuration.
#
# **Cost.** On a GPU it was **not measured**; no GPU has run this yet, and the first step shows the
# time per step. The outputs shown here are the embedded model's on a CPU, about four minutes.
#
# **It needs no other notebook.** It starts from the model of notebook 01 if the runs folder has
# one. Otherwise (every Colab tab is its own machine) it starts from Llama-3.2-1B-Instruct. Without
# a GPU it first teaches the embedded model the format, which takes half a minute.
#
# If the runtime disconnects, run all cells again: training resumes from the last checkpoint, with
# the same guide, data order and random state.

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
# The memory plan for your GPU chooses the model, 4 or 16 bits, the engine for rollouts, and the
# sizes.

# %%
from sage_unsloth import plan_for_card

RUNS = hosted.runs_folder()  # Google Drive once mounted, /kaggle/working, or "runs"
card = plan_for_card(RUNS / "sft" / "model", "llama-3.2-1b-instruct")
card

# %% [markdown]
# ## Parameters
# These settings apply to everything below: the paper's (Table 8) with a GPU, and without one those
# of the embedded model, which trains in four minutes. Guide, reward and the other fields of TRL's
# `GRPOConfig` have their own cells further down.

# %% tags=["parameters"]
from sage_unsloth import prompts

GPU = card.gpu
MODEL = card.model  # or another hub id, or a folder
OUT = RUNS / "sage-branch"  # run all cells again: training resumes, or is only shown
LOAD_IN_4BIT = card.load_in_4bit
ROLLOUTS = card.rollouts  # "vllm" or "transformers"
PROMPT = prompts.prompt_format(tags=["project"])  # as in 01_sft
DATA = "dapo" if GPU else "arithmetic"  # or a file of your own, "mine.jsonl"
DATA_FILE = None  # a local copy of DAPO-Math-17k-Processed where the hub is out of reach
COLUMNS = None  # of a file of your own: {"problem": "question", "answer": "total", "hard": "hard"}
MAX_PROMPT, MAX_COMPLETION = card.max_prompt, card.max_completion  # tokens
MAX_STEPS = card.steps
PROMPTS_PER_STEP, NUM_GENERATIONS = card.prompts_per_step, card.num_generations
MICRO_BATCH = card.micro_batch  # completions in the loss at a time: fewer take less memory
LEARNING_RATE = 5e-6 if GPU else 2e-3
MIN_P = 0.01 if GPU else 0.0
BETA = 0.05  # of the KL term
SAVE_STEPS = 50 if GPU else 20  # optimizer steps between checkpoints
SEED = 3407

# %% [markdown]
# To see how much memory a run of this size needs, and what to change if it does not fit, run
# `python -m sage_unsloth plan --model qwen2.5-math-7b`.
#
# ## A model that knows the format
# RL can reward an answer only if it is between the tags. The embedded base model rarely writes
# them, so it first learns them from worked solutions. An instruct model follows the system prompt.

# %%
from sage_unsloth import load_unsloth, training

load_unsloth(standby=ROLLOUTS == "vllm")  # before trl, transformers and peft
if MODEL == "arithmetic-base":
    training.run_sft(RUNS / "small-sft", model=MODEL, held_out=0)
    MODEL = RUNS / "small-sft" / "model"

# %% [markdown]
# ## Model
# On a GPU, `load_policy` calls Unsloth's `FastLanguageModel.from_pretrained` and `get_peft_model`;
# without one it uses transformers and peft. The reference π_ref in the KL penalty is this model
# with the adapter off, so policy and reference are equal at first. After a finished run this cell
# loads the trained adapter.

# %%
from sage_unsloth import LoraSettings, load_policy

done = OUT / "adapter"  # of an earlier run of this notebook, if it came to its end
model, tokenizer = load_policy(
    MODEL,
    lora=LoraSettings(
        rank=8,
        alpha=16,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    adapter=done if done.exists() else None,
    max_length=MAX_PROMPT + MAX_COMPLETION,
    load_in_4bit=LOAD_IN_4BIT,
    use_vllm=ROLLOUTS == "vllm",
    gpu_memory_utilization=card.gpu_memory_utilization,
    seed=SEED,
    prompt=PROMPT,
)

# %% [markdown]
# ## Data
# A problem is used if its answer can be graded and its prompt fits. TRL expects a column `prompt`
# and passes every other column to the rewards by name. For your own file change nothing here: set
# `DATA` to it, and `COLUMNS` to what its columns are, including those that your rewards read ([your
# own data](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/own_data.md)). Rows that you
# write yourself are `{"problem": "…", "answer": "…"}`, with the answer as text.

# %% tags=["outline"]
from sage_unsloth import load_dataset

data = load_dataset(
    DATA, tokenizer, max_tokens=MAX_PROMPT, path=DATA_FILE, columns=COLUMNS, limit=2000
)
print(data)
rows, dataset = data.rows, data.dataset
print(prompts.render_prompt(tokenizer, dataset[0]["prompt"]))

# %% [markdown]
# ## Reward
# `"answer"` is 1 for a correct answer in the solution tag, otherwise 0. Grading runs in worker
# processes that can be killed
# ([grading](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/grading.md)). Your own
# reward is a function with TRL's signature. `brief` below is an example, used only if you put it
# into the list. It rewards only correct answers: in a group in which all answers are wrong, any
# other reward would decide alone what is learned, at any weight ([your own
# reward](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/own_reward.md)).

# %%
from sage_unsloth import Reward, extract_answer, rewards


def brief(completions, answer, **columns):
    """1 - length/200 for a completion whose answer is, letter by letter, the right one."""
    texts = [completion[-1]["content"] for completion in completions]
    answers = [extract_answer(text, prompt=PROMPT) for text in texts]
    return [
        (found == gold) * (1 - min(len(text), 200) / 200)
        for text, found, gold in zip(texts, answers, answer, strict=True)
    ]


own = Reward(function=brief, weight=0.2)
reward = rewards(["answer"], prompt=PROMPT)  # ["answer", own] adds them up
for answer in (rows[0]["answer"], "7", "no idea"):
    turns = [[{"role": "assistant", "content": PROMPT.solution_text("…", answer)}]]
    given = {name: [value] for name, value in dataset[0].items() if name != "prompt"}
    print(answer, [function([""], turns, **given) for function in reward.functions])

# %% [markdown]
# ## What one step does
# **Group.** For each problem the model writes several completions: a group. Each gets a reward.
#
# **Advantage.** A completion's advantage is its reward minus the mean of its group, divided by the
# group's standard deviation. A completion that is better than its group becomes more probable, a
# worse one less. If all rewards of a group are equal, every advantage is 0 and nothing is learned
# from it: a *dead group*.
#
# **Clip.** The policy may be updated several times with the same completions. The ratio of a
# token's new probability to its old one is clipped at $1 \pm \epsilon$ ($\epsilon$ = 0.2) in the
# direction of the advantage, so that one batch cannot move the policy far.
#
# **KL.** A penalty with weight β = 0.05 pulls each token's probability back to that of the
# reference $\pi_\mathrm{ref}$, the model that RL started from. With $d = \log \pi_\mathrm{ref} -
# \log \pi$ it is $k_3 = e^d - d - 1$, which is 0 if the two agree and grows if they differ.
#
# **Guide.** SAGE multiplies $\pi_\mathrm{ref}$ by a guide $q$ first: $d = \log q + \log
# \pi_\mathrm{ref} - \log \pi$. Where $q > 1$ the pull is stronger.

# %%
import matplotlib.pyplot as plt
import numpy as np

figure, axes = plt.subplots(1, 4, figsize=(12, 2.6), layout="constrained")
group = np.array([1, 0, 0, 1, 0, 0, 0, 0])  # rewards of one group: two of eight are right
axes[0].bar(range(8), (group - group.mean()) / group.std(ddof=1), color="#0072B2")
axes[0].set(title="advantages of a group", xlabel="completion")
ratio = np.linspace(0.5, 1.6, 100)
axes[1].plot(ratio, np.minimum(ratio, 1.2), color="#0072B2", label="advantage +1")
axes[1].plot(ratio, np.minimum(-ratio, -np.maximum(ratio, 0.8)), "--", color="#D55E00", label="−1")
axes[1].set(title="clip", xlabel="new / old probability", ylabel="objective")
axes[1].legend(frameon=False, fontsize=8)
d = np.linspace(-2, 1.5, 100)
axes[2].plot(d, np.exp(d) - d - 1, color="#0072B2")
axes[2].set(title="KL term k3", xlabel="log π_ref − log π")
entropy = np.linspace(0, 3, 100)
axes[3].set(title="guide q (Branch)", xlabel="entropy before the token (nats)")
axes[3].plot(entropy, np.clip(1 + 0.3 * np.maximum(0, entropy - 1.2), 1, 1.4), color="#0072B2")
plt.show()

# %% [markdown]
# ## Guide
# The target of the KL, the *anchor*, is q·π_ref. `BranchGuide` sets q_t = 1 + ratio · max(0, H_t −
# threshold), at most 1.4, so the pull to π_ref is stronger where the policy is undecided. You can
# use `TokenGuide()`, `RandomGuide()` or any object with `needs` and `log_guide` instead; `None` is
# plain GRPO.

# %%
from sage_unsloth import BranchGuide

guide = BranchGuide(ratio=0.3, threshold=1.2)

# %% [markdown]
# ## Look before you train
# These completions are sampled and rewarded as in training. If many groups are dead
# (`dead_groups`), take easier problems, more SFT or more completions per prompt. If `format_rate`
# is low, run SFT or use tags that the model already writes
# ([tags](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/train.md#prompts-tags-and-chat-templates)).

# %%
from sage_unsloth import preview

look = preview(
    model,
    tokenizer,
    rows,
    OUT / "look.jsonl",  # drawn once, by the model as it was before training
    reward=reward,
    guide=guide,
    prompt=PROMPT,
    num_samples=NUM_GENERATIONS,
    temperature=1.0,
    min_p=MIN_P,
    max_completion_length=MAX_COMPLETION,
    batch_size=MICRO_BATCH,
    seed=SEED,
)

# %% tags=["outline"]
print(look)

# %% [markdown]
# Where would the guide act? Each dot is a token of these completions, with its entropy H_t and the
# guide's q_t. Left of the threshold q is 1, so the penalty is the same as in GRPO.

# %% tags=["outline"]
q = np.exp(look.log_guides)
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.scatter(look.entropies, q, s=8, alpha=0.4, color="#0072B2", linewidths=0)
axis.set(
    xlabel="entropy of the policy before a token (nats)",
    ylabel="q",
    title=f"{len(q):,} tokens; the guide touches {(q != 1).mean():.1%} of them",
)
axis.grid(alpha=0.25)
figure.savefig(OUT / "guide.png", dpi=130)

# %% [markdown]
# ## Configuration
# `grpo_config` returns TRL's own `GRPOConfig`, as Unsloth generates it, and takes any of its
# fields. Some of their defaults would silently train something else. `grpo_config` changes these
# even if you leave them out; they are marked **!** below. It also sets `generation_kwargs` so that
# pad tokens are never sampled, because Unsloth ends a completion at its first pad token.

# %%
from sage_unsloth import grpo_config

completions_per_step = PROMPTS_PER_STEP * NUM_GENERATIONS
args = grpo_config(
    OUT,
    tokenizer,
    rollouts=ROLLOUTS,
    recompute_logits=card.recompute_logits,
    max_steps=MAX_STEPS,
    per_device_train_batch_size=MICRO_BATCH,
    gradient_accumulation_steps=completions_per_step // MICRO_BATCH,  # ! Unsloth: 2
    num_generations=NUM_GENERATIONS,
    max_completion_length=MAX_COMPLETION,
    learning_rate=LEARNING_RATE,
    warmup_steps=round(0.1 * MAX_STEPS),
    weight_decay=0.01,
    beta=BETA,  # ! 0: no KL term, and a guide is refused
    loss_type="grpo",  # ! "dapo"
    use_bias_correction_kl=False,  # ! True: another estimator of the KL than the paper's
    scale_rewards="group",  # advantages are divided by the deviation of a group's rewards
    reward_weights=reward.weights,
    temperature=1.0,
    min_p=MIN_P or None,
    vllm_importance_sampling_mode="token_truncate",  # ! weighs whole completions
    save_steps=SAVE_STEPS,
    report_to="none",  # "tensorboard", "trackio" or "wandb"
    seed=SEED,
)

# %% [markdown]
# ## Trainer
# At this point `trl.GRPOTrainer` is the class that Unsloth generated. The assertion checks that it
# did not copy the adapter as its reference: π_ref must be the model with the adapter off. (Without
# a GPU, ignore what Unsloth says about "this GPU".)

# %%
from trl import GRPOTrainer

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=reward.functions,
    train_dataset=dataset,
    args=args,
)
assert "ref" not in model.peft_config, "π_ref must be the model with the adapter off"

# %% [markdown]
# ## Predict, then train
# Before you run the next cell, guess: does the reward rise at once or after a while? Does the KL
# start at 0, and how far does it rise? Does the entropy rise or fall? Write your guess down, then
# watch the curves.
#
# While `guided_kl` is open, the guide acts in Unsloth's loss. `record_run` writes each step's
# metrics to `metrics.jsonl` and saves a checkpoint if you interrupt the kernel. If the runtime
# disconnects, run all cells again: guide, data order and random state are restored.

# %%
from sage_unsloth import guided_kl, record_run

with guided_kl(trainer, guide), record_run(trainer, OUT, name="SAGE-Branch", reward=reward) as run:
    if not run.finished:
        trainer.train(resume_from_checkpoint=run.checkpoint)
metrics = training.read_metrics(OUT)
assert abs(metrics[0]["kl/ref_k3"]) < 1e-3, "policy and π_ref were not one model at the start"

# %% [markdown]
# ## See that it worked
# Compare with your guess.
# - The reward rises. If it stays flat, look at *dead groups*.
# - The KL starts at 0, since policy and reference are the same model, and grows slowly. If it
#   jumps, the learning rate is too high.
# - The loss stays near 0, since the advantages of a group sum to 0. It does not show progress.
# - If the entropy falls to 0, the policy has stopped exploring. The guide is meant to slow that
#   down.
#
# **This is one run with one training seed.** Over eight seeds SAGE-Branch and GRPO do not differ on
# this task: +.000 [−.002, +.002] at pass@1 and −.001 [−.014, +.012] at pass@32
# ([table](https://github.com/sage-unsloth/sage_unsloth/blob/main/data/results/benchmark/arithmetic/report.md)).

# %%
from IPython.display import Image

from sage_unsloth import show_table

show_table(training.training_curve_rows(metrics))
Image(training.plot_training({"SAGE-Branch": metrics}, OUT / "training.png", f"seed {SEED}"))

# %% [markdown]
# Completions are saved at the first step and every 25th. These are from the last of them, with each
# reward if there are several:

# %%
import json

sampled = [json.loads(line) for line in (OUT / "completions.jsonl").read_text().splitlines()]
print("step", sampled[-1]["step"])
for row in [row for row in sampled if row["step"] == sampled[-1]["step"]][:4]:
    named = row.get("rewards", "")
    print(f"{row['grade']:<11} answer {row['answer']:<6} {named} {row['completion'][:300]}")

# %% [markdown]
# ## When something goes wrong
#
# | what you see | what to do |
# |---|---|
# | `frac_reward_zero_std` near 1 | easier problems, more SFT, or more `NUM_GENERATIONS` |
# | `no answer` near 1 | the model does not write the tags: SFT first, or `tags=["boxed"]` |
# | `completions/clipped_ratio` high | truncated ones count as wrong: raise `MAX_COMPLETION` |
# | `kl/ref_k3` jumps, reward falls | a smaller `LEARNING_RATE`, or a larger `BETA` |
# | `sage/share_touched` is 0 | a lower threshold of the guide (see the plot above) |
# | out of memory | a smaller `MICRO_BATCH`, `LOAD_IN_4BIT = True`, restart the kernel |
# | `ContractError` | an untested version of Unsloth: run `python -m sage_unsloth doctor` |
#
# ## The same as one command
# ```
# python -m sage_unsloth train --algorithm sage-branch --from runs/sft --out runs/sage-branch
# ```
# This trains the same weights. It also checks the memory, samples a preflight, and writes
# `run.json`. The other algorithms are listed here, and with their settings in [the
# documentation](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/algorithms.md):

# %% tags=["reproduced"]
from sage_unsloth import training

print(*training.ALGORITHMS, sep=", ")

# %% [markdown]
# ## Next
# Run this notebook again with `guide = None` and another `OUT`, and compare the two on held-out
# problems in [notebook
# 03](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/03_pass_at_k.ipynb), because
# the training reward does not show what was lost. To train on your own questions see [notebook
# 06](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/06_your_own_questions.ipynb).
