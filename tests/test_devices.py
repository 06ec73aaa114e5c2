"""Every function that touches tensors, with its tensors on a GPU and its generator on the CPU.

The GPU is `fake_gpu.FakeGpu`, so none is needed. Which functions must run is read from the package
(`gpu_functions`): a new one that nothing here reaches fails the last test.
"""

import importlib
import math
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import CUDA, MISMATCH, FakeGpu, pretend_gpu_of
from gpu_functions import ELSEWHERE, all_functions, public_names, recorded
from rehearsing import STORED

NAMES = public_names()
RAN: set[tuple[str, str]] = set()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, T, V, H = 4, 6, 40, 8
TIME = {"step": 2, "max_steps": 10}


def get(name, word=""):
    """The function or class of that name; of several, the one whose module has `word` in it."""
    (value,) = [v for v in NAMES[name] if word in v.__module__]
    return value


@contextmanager
def on_gpu():
    with FakeGpu() as fake, recorded(RAN):
        yield fake
    assert fake.operations, "nothing ran on the GPU"


def random(*shape, dtype=torch.float32, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to("cuda")


def make_mask():
    mask = torch.ones(B, T, dtype=torch.int)
    mask[1, 4:] = mask[2, 1:] = mask[3, :] = 0
    return mask.to("cuda")


def make_signals(dtype=torch.float32):
    """As the hook has them, nan outside the mask."""
    mask = make_mask()

    def values(seed, sign):
        return torch.where(mask.bool(), sign * random(B, T, dtype=dtype, seed=seed).abs(), math.nan)

    logps, entropies = [values(i, -1) for i in (1, 2, 3)], [values(i, 1) for i in (4, 5)]
    return get("TokenSignals")(logps[0], logps[1], mask, *entropies, teacher_logps=logps[2])


def make_generator():
    return torch.Generator().manual_seed(3)


def check(result, dtype=None):
    """On the GPU, finite, and of that dtype."""
    assert result.device == CUDA, result.device
    assert dtype is None or result.dtype == dtype, result.dtype
    assert result.isfinite().all()
    return result


GUIDES = {
    "branch": lambda: get("BranchGuide")(threshold=0.3),
    "branch, reference": lambda: get("BranchGuide")(threshold=0.3, source="reference"),
    "token, minmax": lambda: get("TokenGuide")(norm="minmax"),
    "token, rank": lambda: get("TokenGuide")(norm="rank"),
    "token, zscore": lambda: get("TokenGuide")(norm="zscore"),
    "token, causal": lambda: get("TokenGuide")(norm="causal"),
    "token, reference": lambda: get("TokenGuide")(source="reference"),
    "random": lambda: get("RandomGuide")(epsilon=get("CosineSchedule")(0.9, 0.9)),
    "teacher": lambda: get("TeacherGuide")(),
    "adaptive": lambda: get("AdaptiveGuide")(get("BranchGuide")(threshold=0.3), target=0.05),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("generator", [make_generator, lambda: None], ids=["own", "global"])
def test_guides(name, dtype, generator):
    with on_gpu():
        guide = GUIDES[name]()
        log_guide = guide.log_guide(make_signals(dtype), **TIME, generator=generator())
        check(log_guide, torch.float32)
        assert log_guide.abs().max() > 0


def test_every_guide_has_a_case():
    guides = {v.__name__ for vs in NAMES.values() for v in vs if _is_guide(v)}
    with on_gpu():
        assert guides == {type(make()).__name__ for make in GUIDES.values()}
        check(random(1))


def _is_guide(value):
    return (
        isinstance(value, type)
        and hasattr(value, "log_guide")
        and not getattr(value, "_is_protocol", False)
    )


def penalties_by_name():
    return importlib.import_module(get("k2").__module__).PENALTIES


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_and_their_gradient(dtype):
    kl = importlib.import_module(get("k3").__module__)
    with on_gpu():
        ratio = random(B, T, seed=9).abs()
        penalties = {
            "k3": kl.k3,
            "k3, bounded": lambda new, anchor: kl.k3(new, anchor, k3_max=10.0),
            "k3-is": lambda new, anchor: kl.k3_is(new, anchor, ratio),
            **penalties_by_name(),
        }
        for penalty in penalties.values():
            new = random(B, T, dtype=dtype, seed=1).requires_grad_()
            check(penalty(new, random(B, T, dtype=dtype, seed=2))).sum().backward()
            check(new.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_plain_loss(dtype, loss_type, level):
    with on_gpu():
        signals = make_signals(dtype)
        for estimator in ("k3", "k3-is", *penalties_by_name().values()):
            new = signals.policy_logps.clone().requires_grad_()
            loss = get("grpo_loss")(
                new,
                signals.ref_logps,
                signals.mask,
                random(B, seed=7).to(dtype),
                old_per_token_logps=random(B, T, dtype=dtype, seed=8),
                log_guide=random(B, T, seed=9),
                loss_type=loss_type,
                importance_sampling_level=level,
                kl_estimator=estimator,
                max_completion_length=T,
            )
            check(loss).backward()
            check(new.grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_advantage_rules(dtype):
    make_rule = get("advantage_rule")
    rules = importlib.import_module(make_rule.__module__).RULES
    with on_gpu():
        rewards = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, math.nan, 0, 0]])
        rewards = rewards.to("cuda", dtype)
        for name in (*rules, "pkpo,k=3,k_last=1"):
            rule = make_rule(name)
            check(rule(rewards, mean_logps=random(4, 4), **TIME), dtype)
            rule.teaches(rewards, **TIME)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True], ids=["(B,)", "(B, T)"])
def test_token_rules(dtype, wide):
    shape, token_rule = get("shape_advantages"), get("token_rule")
    with on_gpu():
        signals = make_signals(dtype)
        advantages = random(B, T) if wide else random(B)
        old = signals.policy_logps.float() + 0.1
        offered = {"old_logps": old, "generator": make_generator()}
        rules = ("clip-cov,low=-9,high=9,share=0.3", "kl-cov,share=0.5")
        for text in rules:
            changed = check(shape(token_rule(text), signals, advantages, **offered))
            plain = advantages if wide else advantages.unsqueeze(1).expand(B, T)
            assert (changed != plain)[signals.mask.bool()].any(), text
        check(shape(token_rule("kl-cov"), signals, advantages, old_logps=None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("guided", [False, True])
def test_sequence_credit(dtype, guided):
    with on_gpu():
        signals = make_signals(dtype)
        groups = torch.arange(B, device="cuda") // 2
        log_guide = random(B, T) if guided else None
        for advantages in (random(B), random(B, T)):
            found = get("with_sequence_credit")(
                advantages, signals, groups, beta=0.1, log_guide=log_guide
            )
            for part in found:
                check(part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kl_in_the_reward(dtype):
    with on_gpu():
        s = make_signals(dtype)
        check(get("less_kl")(random(B), s.policy_logps, s.ref_logps, s.mask, beta=0.1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_metrics(dtype):
    with on_gpu():
        signals, metrics = make_signals(dtype), {}
        log_guide = torch.where(signals.mask.bool(), 0.1 * random(B, T), 0.0)
        credit = {"credit_abs": torch.where(signals.mask.bool(), random(B, T).abs(), 0.0)}
        get("GuideMetrics")().add(signals, log_guide, lambda t: t, metrics, credit)
    assert {"sage/guide_mean", "kl/anchor_k3", "sage/entropy", "sage/credit_abs"} <= {*metrics}
    assert all(math.isfinite(values[0]) for values in metrics.values())


def test_the_dose_of_a_guide():
    with on_gpu():
        log_guide = 0.1 * random(B, T)
        dose = get("compute_dose")(log_guide, make_mask(), [True, False] * 2, [1, 0] * 2, "aabb")
        assert dose.spread > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rehearsal_and_its_gradient(dtype):
    loss = get("rehearsal_loss")
    with on_gpu():
        for divergence in importlib.import_module(loss.__module__).DIVERGENCES:
            new = random(B, T, dtype=dtype).requires_grad_()
            check(loss(new, random(B, T, dtype=dtype, seed=1), make_mask(), divergence)).backward()
            check(new.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transforms", [(0.0, 0.0, 0.0, 1.0), (2.0, 3.0, 20.0, 0.7)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_scorer_and_its_gradient(dtype, transforms, bias):
    """Indices on the CPU, where Unsloth may leave them, are moved."""
    with on_gpu():
        hidden = random(B, T, H, dtype=dtype).requires_grad_()
        head, index = random(V, H, dtype=dtype, seed=1), torch.arange(B * T).view(B, T)
        scores = get("logps_and_entropies")(
            hidden, head, index, 3, *transforms, lm_head_bias=head[:, 0] if bias else None
        )
        for values in scores:
            check(values, torch.float32)
        scores[0].sum().backward()
        check(hidden.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropies_and_layouts_of_a_rollout_batch(dtype):
    with on_gpu():
        check(get("entropies_of_logits")(random(B, T, V, dtype=dtype), 0.7), torch.float32)
        prompts = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]], device="cuda")
        batch = {"completion_mask": make_mask(), "prompt_mask": prompts}
        check(get("in_completion_layout")(random(B, T + 2, dtype=dtype), batch), torch.float32)
        logps = random(B, T, dtype=dtype)
        scored = get("Scored")
        calls = [scored(logps[:2], random(2, T)), scored(logps[2:], random(2, T))]
        check(get("in_layout")(logps, calls))
        places = make_mask().bool()
        packed = scored(logps[places].unsqueeze(0), random(1, int(places.sum())))
        check(get("in_layout")(torch.where(places, logps, 0), [packed]))


def test_entropies_where_unsloth_scores_logits(unsloth_module):
    zoo = importlib.import_module("unsloth_zoo.rl_replacements")
    with on_gpu(), get("_record_scores")(True) as calls:
        logits, index = random(B, T, V), torch.zeros(B, T, dtype=torch.long, device="cuda")
        check(zoo.chunked_selective_log_softmax(logits, index, 0.7))
        check(calls[0].entropies)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_checks(dtype, tmp_path):
    """Also what is kept of a bad batch, and that it names the place."""
    with on_gpu():
        weight = torch.nn.Parameter(random(3, dtype=dtype))
        weight.grad = random(3, dtype=dtype)
        trainer = SimpleNamespace(
            model=SimpleNamespace(named_parameters=lambda: [("w", weight)]),
            accelerator=SimpleNamespace(process_index=0),
            state=SimpleNamespace(global_step=1, max_steps=2),
            args=SimpleNamespace(output_dir=tmp_path, max_steps=2),
        )
        guard = get("Guard")(trainer)
        s = make_signals(dtype)
        given = {"policy_logps": s.policy_logps, "advantages": random(B), "nothing": None}
        guard.check_signals(given, s.mask)
        guard.check_backward(random(1)[0])
        guard.check_weights()
        bad = s.policy_logps.clone()
        bad[0, 2] = math.inf
        error = get("NotFiniteError")
        with pytest.raises(error, match="policy_logps is inf at row 0, token 2"):
            guard.check_signals({"policy_logps": bad}, s.mask)
        weight.grad[1] = math.nan
        trainer.accelerator.scaler = None
        with pytest.raises(error, match="gradient of w is nan at index 1"):
            guard.check_backward(random(1)[0])


def test_digests_and_means_over_processes():
    with on_gpu():
        weights = {str(dtype): random(3, dtype=dtype) for dtype in DTYPES}
        assert len(set(get("digest")(weights).values())) == len(DTYPES)
        accelerator = SimpleNamespace(num_processes=2, reduce=lambda t, how: 2 * t)
        mask = make_mask()
        for value in get("pooled_means")(
            (random(1), random(1)[0], random(1)[0]), mask, accelerator
        ):
            check(value)


MISTAKES = {
    "a mask on the CPU": lambda s: s.policy_logps * s.mask.cpu(),
    "an index on the GPU into the CPU": lambda s: torch.zeros(9)[s.mask.long()],
    "noise of the CPU's generator": lambda s: torch.randn(
        s.mask.shape, generator=make_generator(), device=s.mask.device
    ),
    "a table on the CPU": lambda s: torch.arange(T) < s.mask.sum(1, keepdim=True),
    "numpy": lambda s: s.mask.numpy(),
    "a sum into the CPU": lambda s: torch.zeros(B, T).add_(s.ref_logps),
    "a number of the CPU in a stack": lambda s: torch.stack([s.mask.sum(), torch.tensor(1)]),
    "concatenated": lambda s: torch.cat([s.ref_logps, torch.zeros(1, T)]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_device_is_noticed(name):
    with on_gpu():
        signals = make_signals()
        check(signals.mask + 1)
        with pytest.raises(MISMATCH):
            MISTAKES[name](signals)


def test_what_a_gpu_allows_is_allowed():
    """A number of the CPU beside a tensor on the GPU, and the CPU's indices into it."""
    with on_gpu():
        values = random(B, T)
        check(values * torch.tensor(2.0))
        check(values[torch.tensor([0, 1])])
        values[torch.tensor([0]), torch.tensor([1])] = 3.0
        assert values[0, 1].item() == 3.0 and values.cpu().numpy()[0, 1] == 3.0


def test_a_gradient_goes_back_over_the_devices():
    with on_gpu():
        start = torch.ones(3, requires_grad=True)
        (start.to("cuda") * random(3)).sum().backward()
        assert start.grad.device.type == "cpu" and start.device.type == "cpu"


COMPOSITIONS = {
    "branch": dict(guide=lambda: GUIDES["branch"]()),
    "reference, teacher": dict(guide=lambda: BothGuide(), teacher=True),
    "credit": dict(
        guide=lambda: GUIDES["token, causal"](),
        kl_estimator="k2",
        credit="sequence",
        advantages="rs-grpo",
    ),
    "rules": dict(
        guide=lambda: GUIDES["random"](),
        advantages="unlikeliness",
        token_advantages="clip-cov,low=-9,high=9",
        max_resamples=1,
        stored=STORED,
        rehearsal_coef=0.5,
    ),
    "kl in the reward": dict(kl_in="reward", log_entropy=True),
}


class BothGuide:
    """Reads what only a rollout batch can give."""

    needs = frozenset({"ref_entropies", "teacher_logps"})

    def log_guide(self, signals, *, step, max_steps, generator=None):
        values = 0.01 * (signals.ref_entropies + signals.teacher_logps)
        return torch.where(signals.mask.bool(), values, 0.0).clamp(-0.3, 0.3)


def train(make_trainer, composition, device, monkeypatch):
    """The rows that one optimizer step logs, and the trained weights."""
    options = dict(COMPOSITIONS[composition])
    guide = options.pop("guide", lambda: None)()
    torch.manual_seed(0)
    trainer = make_trainer(
        max_steps=1,
        max_completion_length=5,
        num_generations=4,
        gradient_accumulation_steps=1,
        optim="adamw_torch",
    )
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(on_gpu())
            pretend_gpu_of(trainer, monkeypatch)
        if options.pop("teacher", False):
            options["teacher"] = stack.enter_context(make_teacher(trainer))
        stack.enter_context(get("with_methods")(trainer, guide, **options))
        trainer.train()
        weights = {n: p.detach().cpu() for n, p in trainer.model.named_parameters()}
    return trainer.state.log_history[0], weights


def check_step(make_trainer, composition, monkeypatch):
    """Rollouts, scoring, loss, gradient and update: every operation's tensors are on one device,
    and no value differs from the CPU's.
    """
    expected, weights = train(make_trainer, composition, "cpu", monkeypatch)
    found, moved = train(make_trainer, composition, "cuda", monkeypatch)
    assert found | {"step_time": 0} == expected | {"step_time": 0}
    assert all(torch.equal(weights[name], moved[name]) for name in weights)


@contextmanager
def make_teacher(trainer):
    from conftest import tiny_model

    from sage_unsloth.trainers.loading import prepare_for_cpu

    teacher = tiny_model(0.2)
    if "unsloth" in sys.modules:
        teacher = prepare_for_cpu(teacher)
    yield teacher.to(next(trainer.model.parameters()).device).eval()


@pytest.mark.long
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_step_of_unsloths_trainer_is_the_one_on_the_cpu(make_trainer, composition, monkeypatch):
    check_step(make_trainer, composition, monkeypatch)


def test_every_function_ran_on_the_gpu(request):
    """Each function that touches tensors has run above; what is excused exists, and has not."""
    if not {"test_guides", "test_a_step_of_unsloths_trainer_is_the_one_on_the_cpu"} <= {
        item.originalname for item in request.session.items if item.path == request.path
    }:
        pytest.skip("only after all tests of this file")
    expected = all_functions()
    open_ones = {(file, name) for file, name in expected - RAN if name not in ELSEWHERE}
    assert not open_ones, "add a case, or a reason to gpu_functions.ELSEWHERE"
    excused = {name for _, name in expected | all_functions(of_trl=True)}
    assert not ELSEWHERE.keys() - excused, "no such function"
