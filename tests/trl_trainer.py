"""The tiny model of `conftest.py` under TRL's own trainer, in a process without Unsloth."""

import sys


def letters(completions, **_):
    """Rewards that differ within a group, whatever the lengths."""
    return [float(sum(map(ord, c[0]["content"])) % 5) for c in completions]


def build_trl_trainer(
    reference="base", *, output_dir, tokenizer=None, lora_noise=0.05, reward=None, **settings
):
    """`trl.GRPOTrainer` with the settings of `conftest.build_trainer`.

    Args:
        reference: π_ref; "base" is the model without its adapter, as Unsloth has it; "ref" TRL's
            copy of the adapter that training begins with; "model" a model of its own, all weights
            of the policy trained.
    """
    import conftest
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    assert "unsloth" not in sys.modules
    settings = conftest.TRAINER_DEFAULTS | settings
    rows = settings.pop("rows", conftest.ROWS)
    policy = conftest.tiny_model(lora_noise)
    if reference == "model":
        settings["model_init_kwargs"] = {"dtype": "float32"}
        policy.merge_and_unload().save_pretrained(output_dir + "/start")
        policy = output_dir + "/start"
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer or conftest.build_tokenizer(),
        reward_funcs=reward if isinstance(reward, list) else [reward or conftest.length_reward],
        args=GRPOConfig(output_dir=output_dir, **settings),
        train_dataset=Dataset.from_list(rows),
    )
    if reference == "base" and "ref" in trainer.model.peft_config:
        trainer.model.delete_adapter("ref")
    trainer.oracle_model = conftest.tiny_model(lora_noise).double()
    return trainer
