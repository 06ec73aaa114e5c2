"""What a notebook calls next to the trainers of TRL and Unsloth: thin functions over the package.

    load_unsloth()
    model, tokenizer = load_policy(MODEL, lora=LoraSettings())
    data = load_dataset("mine.jsonl", tokenizer, max_tokens=512)
    reward = rewards(["answer"])
    args = grpo_config(OUT, tokenizer, max_steps=200)
    print(preview(model, tokenizer, data.rows, OUT / "preview.jsonl", args=args, reward=reward))
    trainer = GRPOTrainer(model, reward.functions, args, data.dataset, processing_class=tokenizer)
    with guided_kl(trainer, BranchGuide()):
        train(trainer, OUT, reward=reward)
    evaluate(["sft=runs/sft", f"mine={OUT}"], ["math500-l5"], OUT / "evaluation")

The commands `sft` and `train` do the same, and also plan, refuse what cannot fit, and record a run.
"""

import lazy_loader

# The names are listed in __init__.pyi; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
