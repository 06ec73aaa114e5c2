"""The figure that a notebook draws while a run trains."""

import struct
from queue import Empty
from types import SimpleNamespace

from sage_unsloth.training import live
from sage_unsloth.training.live import LivePlot, live_figure

CELL = """
from types import SimpleNamespace
from sage_unsloth.training.live import LivePlot
plot = LivePlot(seconds=0)
state = SimpleNamespace(global_step=0, is_world_process_zero=True)
args = SimpleNamespace(output_dir="run/checkpoints")
plot.on_train_begin(args, state, None)
for state.global_step in (1, 2, 3):
    plot.on_log(args, state, None, logs={"reward": 0.5, "loss": "0.1"})
    plot.on_epoch_end(args, state, None)
plot.on_train_end(args, state, None)
"""


def size(png):
    return struct.unpack(">II", png[16:24])


def test_a_panel_for_each_metric_that_was_logged():
    rows = [{"step": s, "reward": 0.1 * s} for s in range(1, 5)]
    one = live_figure(rows)
    two = live_figure([row | {"sage/entropy": 1.0} for row in rows])
    four = live_figure(
        [{"step": 0, "eval/pass@1": 0.5}] + [r | {"kl": 0, "entropy": 1} for r in rows]
    )
    assert size(one)[0] == size(two)[0] and size(four)[1] == 2 * size(two)[1]
    assert one != two
    assert live_figure([{"step": 1, "text": "0.3"}]) is None and live_figure([]) is None


def test_held_out_curves_have_a_panel_and_families_one_of_their_own():
    plain = [{"step": s, "eval/pass@1": 0.2, "eval/pass@4": 0.4} for s in (0, 50)]
    band = {"eval/pass@4_low": 0.3, "eval/pass@4_high": 0.5}
    one, shaded = live_figure(plain), live_figure([row | band for row in plain])
    families = live_figure([row | {"eval/pass@4/algebra": 0.4} for row in plain])
    assert size(families)[0] == 2 * size(one)[0] or size(families) == size(one) != families
    assert one != shaded != families != one
    assert live_figure([row | {"eval/guess@4": 0.1} for row in plain]) != one


def test_the_loss_is_drawn_for_sft_alone():
    losses = [{"step": s, "loss": 0.3 / s} for s in (1, 2)]
    rewards = [{"step": s, "reward": 0.1 * s} for s in (1, 2)]
    assert live_figure(losses) is not None
    both = [loss | reward for loss, reward in zip(losses, rewards, strict=True)]
    assert live_figure(both) == live_figure(rewards)


def test_the_anchor_kl_of_unsloth_is_drawn_where_the_plain_one_is_not_logged():
    both = [{"step": s, "kl": 9.0, "kl/ref_k3": 0.1 * s} for s in (1, 2)]
    plain = [{"step": s, "kl/ref_k3": 0.1 * s} for s in (1, 2)]
    assert live_figure(both) == live_figure(plain)
    assert live_figure([{"step": s, "kl": 0.1 * s} for s in (1, 2)]) == live_figure(plain)


def test_a_trainer_of_ones_own_feeds_it(make_trainer, monkeypatch):
    """Unsloth's real trainer, its every event, and a second training in the same notebook."""
    drawn = []
    monkeypatch.setattr(LivePlot, "_show", lambda self: drawn.append(len(self.rows)))
    plot, trainer = LivePlot(seconds=0), make_trainer(max_steps=2)
    trainer.add_callback(plot)
    trainer.train()
    steps = [row["step"] for row in plot.rows if "reward" in row]
    assert steps == [1, 2] and all(type(row["reward"]) is float for row in plot.rows[:2])
    assert drawn[:2] == [1, 2] and drawn[-1] == len(plot.rows)
    trainer.train()
    assert [row["step"] for row in plot.rows if "reward" in row] == [1, 2]


def test_a_run_that_resumes_shows_its_earlier_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "reward": 0.5}}\n' for step in (0, 1, 2, 3))
    )
    plot, args = LivePlot(), SimpleNamespace(output_dir=str(tmp_path / "checkpoints"))
    for step, expected in ((2, [0, 1, 2]), (0, [])):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        plot.on_train_begin(args, state, None)
        assert [row["step"] for row in plot.rows] == expected


def test_outside_a_notebook_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(live, "live_figure", lambda *_: 1 / 0)
    plot, state = LivePlot(seconds=0), SimpleNamespace(global_step=1, is_world_process_zero=True)
    plot.on_log(None, state, None, logs={"reward": 1.0})
    plot.on_train_end(None, state, None)
    assert plot.rows == [{"reward": 1.0, "step": 1}]


def test_a_notebook_has_one_figure_that_is_replaced(tmp_path):
    """A real kernel: one display, then updates of it."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path))
    kinds = []
    try:
        request = client.execute(CELL)
        while True:
            try:
                message = client.get_iopub_msg(timeout=0.5)
            except Empty:
                assert manager.is_alive()
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            assert message["msg_type"] != "error", content
            if "image/png" in content.get("data", {}):
                kinds.append((message["msg_type"], content["transient"]["display_id"]))
            if content.get("execution_state") == "idle":
                break
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert [kind for kind, _ in kinds] == ["display_data"] + ["update_display_data"] * 3
    assert len({place for _, place in kinds}) == 1
