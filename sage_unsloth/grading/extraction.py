r"""Finds the answer in a completion, by different rules in training and in evaluation.

Both ignore the reasoning, which ends with the last `REASONING_END`: the prompt has opened it, so
everything before belongs to it, tags and boxes included. A completion that opens reasoning and does
not close it gives no answer. One without any reasoning tag, as of a base model, is read completely.
Other models' `<think>` counts as reasoning too. Text after a written end token is not read.

    training     Exactly one complete solution tag, followed only by white space and end tokens.
                 What a policy could add to be right by chance (a second tag, a retraction, an
                 unclosed attempt) makes it no answer.
    evaluation   The last solution tag, which must be complete; text may follow. Without any tag,
                 the last `\boxed{}`, which other models use.

Zero-width characters, and end tokens at the end of a tag, are not part of the answer.

The tags are those of a `PromptFormat`. If its answers are boxed, there are no solution tags:

    training     Exactly one complete `\boxed{}`, followed only by the end of a formula or sentence
                 (`BEHIND_A_BOX`), white space and end tokens.
    evaluation   The last `\boxed{}`.
"""

import functools
import re

from sage_unsloth.prompts import BEHIND_A_BOX, BOX, END_TOKENS, PROJECT_PROMPT, PromptFormat

VERSION = 2
"""Changes whenever another answer may be taken from the same completion; 1 took the last complete
tag, wherever it stood."""
FENCE, PYTHON = "`" * 3, ("python", "python3", "py")
_ENDS = re.compile("(?:" + "|".join(map(re.escape, END_TOKENS)) + r"|\s)+")
# Soft hyphen, joiners, marks of direction, invisible operators, byte order mark, variant selector.
_NO_WIDTH = dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF, 0xFE0E, 0xFE0F)
)


_OTHERS = ("<think>", "</think>")  # the tags of other models' working


@functools.lru_cache(maxsize=64)
def _marks(prompt: PromptFormat) -> tuple[dict[str, str], re.Pattern[str]]:
    """The meaning of each mark of a format, and one pattern for all of them."""
    marks: dict[str, str] = dict.fromkeys(END_TOKENS, "end")
    if prompt.solution is not None:
        marks |= {prompt.solution[0]: "opens", prompt.solution[1]: "closes"}
    for start, end in {_OTHERS, prompt.reasoning or _OTHERS}:
        marks |= {start: "starts working", end: "ends working"}
    # Longest first, because the first alternative that matches wins.
    return marks, re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def extract_answer(
    completion: str, *, boxed: bool = False, prompt: PromptFormat = PROJECT_PROMPT
) -> str | None:
    """The text of a completion's answer without surrounding white space; None if it has no answer.

    An empty tag gives "".

    Args:
        boxed: use the rules of evaluation, in which the last box can be the answer, instead of
            those of training.
        prompt: defines the tags of an answer.
    """
    meanings, pattern = _marks(prompt)
    text = completion if completion.isascii() else completion.translate(_NO_WIDTH)
    tags: list[tuple[int, int, int]] = []  # complete ones: begin and end of the inside, and end
    first = opened = marks = 0  # where the answer's part begins; the open tag's text, 0 for none
    end, working = len(text), False
    for result in pattern.finditer(text):
        meaning = meanings[result.group()]
        if meaning == "ends working":
            tags, first, opened, marks, working = [], result.end(), 0, 0, False
        elif meaning == "starts working":
            working = True
        elif meaning == "opens":
            opened, marks = result.end(), marks + 1
        elif meaning == "closes":
            marks += 1
            if opened:
                tags.append((opened, result.start(), result.end()))
            opened = 0
        elif not opened:  # the end, where it is no end token inside a tag
            end = result.start()
            break
    if working:
        return None
    if prompt.solution is None:
        if boxed:
            return _last_box(text[first:end])
        # Text after the first end token: the model went on.
        return None if _without_ends(text[end:]) else _only_box(text[first:end])
    if not boxed:
        # One opening and one closing mark: a second attempt is a second guess.
        if marks != 2 or len(tags) != 1 or _without_ends(text[tags[0][2] :]):
            return None
    elif marks == 0:
        return _last_box(text[first:end])
    elif opened or not tags:
        return None
    return _without_ends(text[slice(*tags[-1][:2])]).strip()


def _without_ends(text: str) -> str:
    """The text without end tokens and white space at its end."""
    # One pass: a pattern anchored at the end would retry at every white space.
    end = len(text)
    for run in _ENDS.finditer(text):
        if run.end() == len(text):
            end = run.start()
    return text[:end]


def _last_box(text: str) -> str | None:
    brace = text.rfind(r"\boxed{") + len(r"\boxed")
    end = closing_brace(text, brace) if text[brace : brace + 1] == "{" else None
    return None if end is None else text[brace + 1 : end].strip()


def _only_box(text: str) -> str | None:
    """The inside of a text's only box, if nothing but `BEHIND_A_BOX` follows it."""
    text = text.rstrip(BEHIND_A_BOX)
    brace = text.find(BOX) + len(BOX) - 1
    if text.count(BOX) != 1 or closing_brace(text, brace) != len(text) - 1:
        return None
    return text[brace + 1 : -1].strip()


def closing_brace(text: str, start: int) -> int | None:
    """The position where the brace at `start` is closed, or None; escaped braces are skipped."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return match.start()
    return None


def last_block(completion: str, prompt: PromptFormat = PROJECT_PROMPT) -> str | None:
    """The last block of Python after the reasoning, between "```python" and "```", or None.

    None also if the text has a solution tag, or ends within a block.
    """
    meanings, pattern = _marks(prompt)
    text = completion.translate(_NO_WIDTH)
    first, end, other = 0, len(text), False
    for mark in pattern.finditer(text):
        meaning = meanings[mark.group()]
        if meaning == "ends working":
            first, other = mark.end(), False
        elif meaning == "end":  # what stands behind it is not read
            end = mark.start()
            break
        else:
            other = True
    if other:
        return None
    result, lines, is_python = None, None, False
    for line in text[first:end].splitlines():
        fence = line.strip()
        if lines is None:
            if fence.startswith(FENCE):
                lines, is_python = [], fence[len(FENCE) :].strip().lower() in PYTHON
        elif fence == FENCE:
            result, lines = ("\n".join(lines) if is_python else result), None
        else:
            lines.append(line)
    return None if lines is not None else result


def strip_fence(text: str) -> str:
    """The inside of a block of code, if the text is one block and nothing else."""
    first, _, rest = text.strip().partition("\n")
    inside, _, last = rest.rpartition("\n")
    if not first.startswith(FENCE) or last.strip() != FENCE or FENCE in inside:
        return text
    return inside
