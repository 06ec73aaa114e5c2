r"""The answer that a completion gives: where it may stand, in training and in evaluation.

Both read the completion outside its working. The working ends with the last `REASONING_END`: the
prompt has opened it, so what stands before is working, tags and boxes in it included. A completion
that opens working and does not close it gives no answer. A completion without any working tag, as
of a base model, is read as a whole. Other models' `<think>` counts as working too. What stands
behind an end token that is written out is not read: the model has ended there.

    training     One solution tag, complete, and nothing behind it but white space and end tokens.
                 What a policy could add to be right by chance (a second tag, a tag and then a
                 retraction, an attempt that is left open) makes it no answer.
    evaluation   The last solution tag, which must be complete; text may follow. Where there is no
                 tag at all, the last `\boxed{}`: models that were not trained here answer so.

Inside a tag, characters of no width and end tokens at its end are no part of the answer.
"""

import re

from sage_unsloth.prompts import REASONING_END, REASONING_START, SOLUTION_END, SOLUTION_START

VERSION = 2
"""Changes whenever another answer may be taken from the same completion; 1 took the last complete
tag, wherever it stood."""
END_TOKENS = (
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>",
    "<|eos|>", "<eos>", "<end_of_turn>", "<|endofturn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<pad>", "<|pad|>",
)  # fmt: skip
FENCE, PYTHON = "`" * 3, ("python", "python3", "py")
_WORKING_STARTS, _WORKING_ENDS = (REASONING_START, "<think>"), (REASONING_END, "</think>")
_MARKS = re.compile(
    "|".join(
        re.escape(mark)
        for mark in (*_WORKING_STARTS, *_WORKING_ENDS, SOLUTION_START, SOLUTION_END, *END_TOKENS)
    )
)
_ENDS = re.compile("(?:" + "|".join(map(re.escape, END_TOKENS)) + r"|\s)+")
# Soft hyphen, joiners, marks of direction, invisible operators, byte order mark, variant selector.
_NO_WIDTH = dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF, 0xFE0E, 0xFE0F)
)


def extract_answer(completion: str, *, boxed: bool = False) -> str | None:
    r"""The stripped text of a completion's answer, or None where it gives none.

    An empty tag is the answer "".

    Args:
        completion: the text, without the prompt.
        boxed: the rules of evaluation, by which a box can be an answer; else those of training.
    """
    text = completion.translate(_NO_WIDTH)
    tags: list[tuple[int, int]] = []  # of the texts inside complete tags
    first = opened = marks = 0  # where the answer's part begins; the open tag's text, 0 for none
    end, working = len(text), False
    for found in _MARKS.finditer(text):
        mark = found.group()
        if mark in _WORKING_ENDS:
            tags, first, opened, marks, working = [], found.end(), 0, 0, False
        elif mark in _WORKING_STARTS:
            working = True
        elif mark == SOLUTION_START:
            opened, marks = found.end(), marks + 1
        elif mark == SOLUTION_END:
            marks += 1
            if opened:
                tags.append((opened, found.start()))
            opened = 0
        elif not opened:  # the end, where it is no end token inside a tag
            end = found.start()
            break
    if working:
        return None
    if not boxed:
        if marks != 2 or len(tags) != 1 or _without_ends(text[tags[0][1] + len(SOLUTION_END) :]):
            return None
    elif marks == 0:
        return _last_box(text[first:end])
    elif opened or not tags:
        return None
    return _without_ends(text[slice(*tags[-1])]).strip()


def _without_ends(text: str) -> str:
    """The text without the end tokens and the white space that it ends in."""
    end = len(text)
    for run in _ENDS.finditer(text):
        if run.end() == len(text):
            end = run.start()
    return text[:end]


def _last_box(text: str) -> str | None:
    brace = text.rfind(r"\boxed{") + len(r"\boxed")
    end = closing_brace(text, brace) if text[brace : brace + 1] == "{" else None
    return None if end is None else text[brace + 1 : end].strip()


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened at `start` is closed, or None; escaped braces do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return match.start()
    return None


def last_block(completion: str) -> str | None:
    """The last block of Python behind the working (between lines "```python" and "```"), or None.

    None also where the text has a solution tag, which alone could hold the answer, or ends within
    a block.
    """
    text = completion.translate(_NO_WIDTH)
    for mark in _WORKING_ENDS:
        text = text[text.rfind(mark) + len(mark) :] if mark in text else text
    if any(mark in text for mark in (*_WORKING_STARTS, SOLUTION_START, SOLUTION_END)):
        return None
    found, lines, is_python = None, None, False
    for line in text.splitlines():
        fence = line.strip()
        if lines is None:
            if fence.startswith(FENCE):
                lines, is_python = [], fence[len(FENCE) :].strip().lower() in PYTHON
        elif fence == FENCE:
            found, lines = ("\n".join(lines) if is_python else found), None
        else:
            lines.append(line)
    return None if lines is not None else found


def unfenced(text: str) -> str:
    """What is inside a block of code, where the text is one block and nothing else."""
    first, _, rest = text.strip().partition("\n")
    inside, _, last = rest.rpartition("\n")
    if not first.startswith(FENCE) or last.strip() != FENCE or FENCE in inside:
        return text
    return inside
