"""The shape of Unsloth's published GRPO notebooks, and what is added to train it with a guide: a
chat template of their own, several reward functions, and a config that leaves β, the loss type and
the KL's estimator at their defaults.
"""

import re

import pytest

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl

pytestmark = pytest.mark.usefixtures("unsloth_module")
START, END, OPEN, CLOSE = "<think>", "</think>", "<answer>", "</answer>"
SYSTEM = f"Reason between {START} and {END}, then answer between {OPEN} and {CLOSE}."
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + eos_token }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + START + "' }}{% endif %}"
)


def texts(completions):
    return [completion[0]["content"] for completion in completions]


def in_format(completions, **_):
    pattern = re.compile(f"{END}.*?{OPEN}(.+?){CLOSE}\\s*$", re.DOTALL)
    return [3.0 if pattern.search(text) else 0.0 for text in texts(completions)]


def nearly_in_format(completions, **_):
    return [
        sum(0.5 if text.count(tag) == 1 else -0.5 for tag in (END, OPEN, CLOSE))
        for text in texts(completions)
    ]


def right(prompts, completions, answer, **_):
    assert prompts[0][0] == {"role": "system", "content": SYSTEM}
    found = [re.search(f"{OPEN}(.+?){CLOSE}", text) for text in texts(completions)]
    return [3.0 if m and m[1] == gold else -1.0 for m, gold in zip(found, answer, strict=True)]


def last_number(completions, answer, **_):
    found = [re.findall(r"\d+", text) for text in texts(completions)]
    return [float(bool(n) and n[-1] == gold) for n, gold in zip(found, answer, strict=True)]


REWARDS = [in_format, nearly_in_format, right, last_number]


def published_trainer(folder, **added):
    """As the notebooks build it; what a CPU needs is marked."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_policy(data_folder() / BASE_MODEL, lora=LoraSettings(rank=32, alpha=64))
    tokenizer.chat_template = TEMPLATE
    rows = [{"problem": f"1{i}*6=?", "solution": str((10 + i) * 6)} for i in range(8)]
    dataset = Dataset.from_list(rows).map(
        lambda row: {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": row["problem"]},
            ],
            "answer": row["solution"],
        }
    )
    arguments = dict(
        temperature=1.0,
        learning_rate=5e-6,
        weight_decay=0.001,
        lr_scheduler_type="linear",
        optim="adamw_torch",  # theirs, adamw_8bit, needs a GPU
        logging_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=24,
        max_steps=2,
        save_steps=100,
        report_to="none",
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        fp16=False,
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=REWARDS,
        args=GRPOConfig(**(arguments | added)),
        train_dataset=dataset,
    )


def test_what_is_refused_says_what_to_set(tmp_path):
    for added, remedy in (
        ({}, r"Set beta=0\.05"),
        ({"beta": 0.05}, r"Set GRPOConfig\(use_bias_correction_kl=False\)"),
    ):
        trainer = published_trainer(tmp_path, **added)
        with pytest.raises(ValueError, match=remedy), guided_kl(trainer, BranchGuide()):
            pytest.fail("it must not open")


def test_two_settings_and_two_lines_train_it(tmp_path):
    trainer = published_trainer(tmp_path, beta=0.05, use_bias_correction_kl=False)
    with guided_kl(trainer, BranchGuide(threshold=0.1)):
        trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 2 and logs[0]["kl/ref_k3"] == 0
    assert any(row["sage/guide_max"] > 1 for row in logs)
    for row in logs:
        parts = [row[f"rewards/{reward.__name__}/mean"] for reward in REWARDS]
        assert row["reward"] == pytest.approx(sum(parts), abs=1e-5)
    assert trainer.args.loss_type == "dapo", "the default is trained as it is"
