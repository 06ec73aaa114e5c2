"""The lines that are left out are these and no others."""

import logging
import subprocess
import sys

import pytest

from sage_unsloth.trainers.known_lines import without_known_lines

XFORMERS = (
    "Unsloth: xformers is installed but cannot load with torch 2.14.1+cu130 (it was built for "
    "2.10.0+cu128), so PyTorch attention is used instead.\n"
    "To install a matching xformers, run `unsloth install-kernels xformers`, or `pip uninstall "
    "xformers` to hide this. UNSLOTH_ENABLE_LOGGING=1 shows the full error."
)
FLOAT32 = (
    "Unsloth: Model is in float32 and this GPU has no bfloat16 support, so training stays in "
    "float32. Pass fp16 = True to force float16 mixed precision instead."
)
ENUM = (
    "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value "
    "type. Calling register_constant() on Enum subclasses is deprecated and will be an error in a "
    "future release."
)


@pytest.mark.smoke
def test_known_lines_are_left_out_and_all_others_pass(capsys):
    others = [
        "Unsloth: a warning of another kind",
        "xformers is broken",
        f"{FLOAT32} And more.",
        "Unsloth: Will patch your computer, and something new",
        "",
        "no end of line",
    ]
    with without_known_lines(gpu=False):
        print("🦥 Unsloth: Will patch your computer to enable 2x faster free finetuning.")
        print("\n".join(others[:2]))
        print(XFORMERS)
        print(FLOAT32)
        print("\n".join(others[2:]), end="")
    print("!\n" + XFORMERS)
    assert capsys.readouterr().out == "\n".join(others) + "!\n" + XFORMERS + "\n"


def test_what_a_gpu_trains_in_is_said(capsys):
    with without_known_lines(gpu=True):
        print(FLOAT32)
    assert capsys.readouterr().out == FLOAT32 + "\n"


def test_known_records_are_left_out_and_all_others_pass(caplog, monkeypatch):
    logger = logging.getLogger("torch.utils._pytree")
    # As it is before torch and Unsloth have set it up.
    for name, value in {
        "handlers": [caplog.handler],
        "propagate": False,
        "disabled": False,
    }.items():
        monkeypatch.setattr(logger, name, value)
    with caplog.at_level(logging.WARNING, logger=logger.name):
        with without_known_lines(gpu=True):
            logger.warning(ENUM, "<enum 'KernelPreference'>")
            logger.warning(ENUM, "<enum 'Another'>")
            logging.getLogger("another").warning(ENUM, "<enum 'KernelPreference'>")
        logger.warning(ENUM, "<enum 'KernelPreference'>")
    assert [record.args[0] for record in caplog.records] == [
        "<enum 'Another'>",
        "<enum 'KernelPreference'>",
        "<enum 'KernelPreference'>",
    ]


def test_unsloth_loads_without_a_word_and_transformers_after_it(tmp_path):
    """As `train` loads it: after the plan of a model in a folder, whose config.json is read."""
    code = (
        "import sys\n"
        "from sage_unsloth.models.embedded import data_folder\n"
        "from sage_unsloth.planning.plan import memory_report\n"
        "from sage_unsloth.training.recipes import setup_of, starting_point, rlvr_config\n"
        "point = starting_point(data_folder() / 'arithmetic-base', 'sft')\n"
        "memory_report(setup_of(point.preset, rlvr_config(point.preset), None), 'x', None)\n"
        "assert 'transformers' not in sys.modules\n"
        "from sage_unsloth.trainers.loading import load_unsloth\n"
        "load_unsloth()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
