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
# **At the end you have** an adapter and a merged model that answer in the format
# `<start_working_out>` … `<SOLUTION>` and then stop, a table of how many completions had that
# format before and after, and the command for the next stage.
#
# **Cost.** The GPU decides which model is trained: Qwen2.5-Math-7B with 24 GB or more, Qwen3-1.7B
# on a T4, the tiny embedded model without a GPU. Time and memory on a GPU were **not measured**; no
# GPU has run this yet. The outputs shown here are the embedded model's on a CPU, with the time
# below.
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
# The memory plan for your GPU chooses the first of these models that fits in 16 bits, or else in 4
# bits, and the lengths.

# %%
from sage_unsloth import plan_for_card

card = plan_for_card("qwen2.5-math-7b", "qwen3-1.7b")
card

# %% [markdown]
# ## Parameters
# All settings are in this cell: the paper's (Table 7) with a GPU, and without one those of the
# embedded model, which trains in a minute. `RUNS` is a folder that survives the session: Google
# Drive on Colab after you mount it (`from google.colab import drive;
# drive.mount("/content/drive")`), `/kaggle/working` on Kaggle, `runs` elsewhere.

# %% tags=["parameters"]
from sage_unsloth import hosted, prompts

GPU = card.gpu
RUNS = hosted.runs_folder()
OUT = RUNS / "sft"  # run all cells again with the same folder: training resumes, or is only shown
MODEL = card.model  # or another hub id, or a folder
LOAD_IN_4BIT = card.load_in_4bit
PROMPT = prompts.prompt_format(tags=["project"])  # "think-answer", "boxed", your own four
DATA = "openmath" if GPU else "arithmetic"
DATA_FILE = None  # a local copy of OpenMathReasoning-mini where the hub is out of reach
HELD_OUT = 32  # rows for the comparison before and after
MAX_LENGTH = card.sft_length  # tokens of a row: prompt, working, answer, EOS
MAX_STEPS, EPOCHS = (-1, 2) if GPU else (40, 2)  # -1: as many as the epochs take
BATCH_SIZE = 1 if GPU else 16
LEARNING_RATE = 2e-4 if GPU else 5e-4
SAVE_STEPS = 100  # optimizer steps between checkpoints
SEED = 3407

# %% [markdown]
# ## Model
# On a GPU, `load_policy` calls Unsloth's `FastLanguageModel.from_pretrained` and `get_peft_model`;
# without one it uses transformers and peft. Either way the tokenizer gets the [project's chat
# template](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/train.md#prompts-tags-and-chat-templates),
# and a pad token that differs from EOS, because Unsloth finds the end of a completion by the pad
# token. `targets` chooses the layers that get an adapter. After a finished run this cell loads the
# trained adapter.

# %%
from sage_unsloth import LoraSettings, load_policy, load_unsloth

load_unsloth()  # before trl, transformers and peft
done = OUT / "adapter"  # of an earlier run of this notebook, if it came to its end
model, tokenizer = load_policy(
    MODEL,
    lora=LoraSettings(
        rank=8,
        alpha=16,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    adapter=done if done.exists() else None,
    max_length=MAX_LENGTH,
    load_in_4bit=LOAD_IN_4BIT,
    seed=SEED,
    prompt=PROMPT,
)
model.print_trainable_parameters()

# %% [markdown]
# ## Data
# A row is used if its answer is a number, its prompt takes at most half of `MAX_LENGTH`, and the
# whole text fits, including the end-of-sequence token. A model that never sees the end of a
# solution does not learn to stop. The table counts the rows that each filter left. For your own
# file pass `columns=` ([your own
# data](https://github.com/sage-unsloth/sage_unsloth/blob/main/docs/own_data.md)).

# %%
from sage_unsloth import load_dataset

data = load_dataset(
    DATA,
    tokenizer,
    stage="sft",
    max_tokens=MAX_LENGTH,
    path=DATA_FILE,
    held_out=HELD_OUT,
    prompt=PROMPT,
)
data

# %% [markdown]
# The system prompt names the tags for reasoning and answer, and the solution uses them. TRL's
# trainer takes rows of `prompt` and `completion`; the chat template adds the system prompt if a
# conversation has none.

# %%
dataset = data.dataset
print(
    tokenizer.apply_chat_template(dataset[0]["prompt"] + dataset[0]["completion"], tokenize=False)
)

# %% [markdown]
# ## Before
# The untrained model writes four completions of each held-out problem at temperature 1. They are
# saved, so a second run of this cell does not sample again.

# %%
from sage_unsloth import preview

sampling = {
    "num_samples": 4,
    "temperature": 1.0,
    "max_completion_length": MAX_LENGTH // 2,
    "batch_size": 8 if GPU else 128,
    "seed": SEED,
}
look = {"prompt": PROMPT, "num_prompts": None} | sampling  # at all held-out rows
looks = {"before": preview(model, tokenizer, data.held_out, OUT / "held-out/before.jsonl", **look)}

# %% [markdown]
# ## Configuration
# TRL's own `SFTConfig`: add or change any of its fields here.

# %%
from trl import SFTConfig

args = SFTConfig(
    output_dir=str(OUT / "checkpoints"),
    max_steps=MAX_STEPS,
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=BATCH_SIZE,
    gradient_accumulation_steps=1,
    learning_rate=LEARNING_RATE,
    warmup_steps=5,
    lr_scheduler_type="linear",
    weight_decay=0.01,
    max_length=MAX_LENGTH,
    completion_only_loss=True,  # the prompt is given, not learned
    packing=False,
    save_steps=SAVE_STEPS,
    save_total_limit=None,  # `train` below keeps the two newest checkpoints
    logging_steps=1,
    disable_tqdm=True,  # `train` below has a bar of its own
    report_to="none",  # "tensorboard", "trackio" or "wandb"
    seed=SEED,
    optim="adamw_8bit" if GPU else "adamw_torch",
    bf16=None if GPU else False,
    use_cpu=not GPU,
    gradient_checkpointing=False,  # on a GPU Unsloth's own is in the model
    dataloader_pin_memory=GPU,
)

# %% [markdown]
# ## Trainer
# `training.sft_trainer_class()` is `trl.SFTTrainer`: Unsloth's version on a GPU, and without one
# TRL's, with the model's own loss, because TRL's needs a GPU kernel. The trainer gets a copy of the
# tokenizer, because it changes the padding. The text that the first row teaches must end in EOS:

# %%
import copy

from sage_unsloth import training

trainer = training.sft_trainer_class()(
    model=model, processing_class=copy.deepcopy(tokenizer), train_dataset=dataset, args=args
)
labels = trainer.data_collator([trainer.train_dataset[0]])["labels"][0]
learned = tokenizer.decode(labels[labels != -100])
print(learned)
assert learned.endswith(tokenizer.eos_token), "the row was cut: raise MAX_LENGTH"

# %% [markdown]
# ## Train
# `train` calls `trainer.train()`. It also writes each step's metrics to `metrics.jsonl`, updates a
# plot, and saves a checkpoint if you interrupt the kernel. If the runtime disconnects, run all
# cells again: training resumes from the newest complete checkpoint. At the end the adapter is
# merged into its base.

# %%
from sage_unsloth import train

steps = train(trainer, OUT, name="SFT", merge_with=tokenizer)

# %% [markdown]
# ## Compare before and after
# The same problems again, with the trained adapter:
# - *In format* should be near 1 after SFT: an answer outside the solution tag cannot be rewarded.
# - *Right*, the share of correct answers, should be neither 0 nor 1: RL learns from problems that
#   are sometimes solved.
# - *Cut* completions were truncated. If there are many, the rows are too long for `MAX_LENGTH`, or
#   there were too few of them.

# %% tags=["outline"]
from sage_unsloth import show_table

looks["after"] = preview(model, tokenizer, data.held_out, OUT / "held-out/after.jsonl", **look)
names = {"format_rate": "in format", "solve_rate": "right", "truncation_rate": "cut"}
show_table(
    [
        {"model": f"{when} SFT"}
        | {title: f"{one.shares[name]:.3f}" for name, title in names.items()}
        for when, one in looks.items()
    ]
)

# %% [markdown]
# One problem before and after, and the loss:

# %%
for when, one in looks.items():
    first = one.records[0]
    print(f"{when} SFT ({first['grade']}, answer {first['gold']}):")
    print(f"{first['completion'][:400]}\n")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot([row["step"] for row in steps], [row["loss"] for row in steps], color="#0072B2")
axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="SFT")
axis.grid(alpha=0.25)
figure.savefig(OUT / "training.png", dpi=130)

# %% [markdown]
# ## When something goes wrong
#
# | what you see | what to do |
# |---|---|
# | the filters leave few rows | raise `MAX_LENGTH`, as far as memory allows |
# | out of memory | `LOAD_IN_4BIT = True`, or a smaller `MAX_LENGTH`; restart the kernel |
# | many completions are truncated, few in format | more steps; check that the rows end in EOS |
# | the loss jumps | a smaller `LEARNING_RATE` |
# | after a disconnect it starts from step 0 | there was no checkpoint yet: a smaller `SAVE_STEPS` |

# %% [markdown]
# ## The merged model
# RL starts from this merged model, and its reference π_ref (the model with RL's adapter off) is
# this model too. The folder is an ordinary model that transformers can load.

# %% tags=["outline"]
print(*sorted(path.name for path in (OUT / "model").iterdir()))

# %% [markdown]
# ## The same as one command
# ```
# python -m sage_unsloth sft --model qwen2.5-math-7b --out runs/sft
# python -m sage_unsloth sft --model arithmetic-base --out runs/sft      # without a GPU
# ```
# The command also checks memory and the folder, and records settings, versions and digests in
# `run.json`, which `train --from runs/sft` and `export` read.
#
# ## Next
# [notebook 02](https://github.com/sage-unsloth/sage_unsloth/blob/main/notebooks/02_rlvr.ipynb)
# continues from here with reinforcement learning.
