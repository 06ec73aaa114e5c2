"""What rows a trainer takes in which step, whole and resumed."""

import copy

from sage_unsloth.patch.guided import guided_kl

ROWS = [{"prompt": [{"role": "user", "content": "?" * (i + 1)}]} for i in range(6)]
SETTINGS = {"rows": ROWS, "gradient_accumulation_steps": 1}
"""Two of the rows in a step: three steps a pass."""
STEPS = 8


def taken(trainer, resume=None):
    """The prompts of each generation batch, in order."""
    seen = []
    generate = trainer._generate_and_score_completions

    def watched(inputs):
        seen.append([row["prompt"][0]["content"] for row in copy.deepcopy(inputs)])
        return generate(inputs)

    trainer._generate_and_score_completions = watched
    with guided_kl(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return seen


def check_order_is_kept(make_trainer, after, **settings):
    """A run resumed after `after` steps takes the rows of a run that was not stopped."""
    settings = SETTINGS | {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1} | settings
    trainer = make_trainer(**settings)
    whole = taken(trainer)
    assert len(whole) == STEPS
    passes = [{prompt for batch in whole[i : i + 3] for prompt in batch} for i in (0, 3)]
    assert all(len(prompts) == len(ROWS) for prompts in passes), "a pass takes every row once"
    assert whole[:3] != whole[3:6], "another pass has another order"
    folder = f"{trainer.args.output_dir}/checkpoint-{after}"
    assert taken(make_trainer(**settings), folder) == whole[after:]
