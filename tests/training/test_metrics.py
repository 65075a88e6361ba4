"""The meters that the doctor's rules read: numbers known twice, each against a second way to know it."""
import math
import random

import numpy as np
import pytest
import torch
from deep import first
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.objective.advantages import gae
from instruct_goose.objective.group import PRESETS
from instruct_goose.training.callbacks import RecheckRewards, generators_kept
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.metrics import correlation, discounts, of_sampler, of_texts, prompt_nll, weight_meter
from instruct_goose.training.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer

WORDS = [f"w{i}" for i in range(9)]
TOKENIZER = word_tokenizer(WORDS, 16, pad="<end>", bos="<end>", eos="<end>")
PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7"]


def made(seed=0, algorithm="ppo", reference=None, trainer=RLHFTrainer, optimizer=None, callbacks=(), dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_positions=16, n_embd=16, n_layer=1, n_head=2))
    for p in model.parameters(): torch.nn.init.normal_(p, std=.3)
    group = 2 if PRESETS[algorithm]["group_size"] > 1 else 1
    small = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=1e-3, group_size=group) | changes
    return trainer(model.to(dtype), reference, RLHFConfig.preset(algorithm, **small), tokenizer=TOKENIZER, optimizer=optimizer, callbacks=callbacks)


def even(texts): return [len(text) % 5 - 2. for text in texts]


def step(t): return t.step((PROMPTS * 2)[:8 // t.config.group_size], even)


# --- what the loss pulls at -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("micro", first(1, [3, None, 1]))
@pytest.mark.parametrize("algorithm", PRESETS)
def test_the_loss_of_every_preset_pulls_as_the_equations_say(algorithm, micro):
    m = step(made(algorithm=algorithm, micro_batch_size=micro, minibatches=1, ent_coef=.03))
    names = ["policy_gradient_scale", "policy_gradient_cosine", "entropy_gradient_scale"]
    names += ["value_gradient_scale", "value_gradient_cosine"] if algorithm == "ppo" else []
    assert [m[name] for name in names] == pytest.approx([1.] * len(names), abs=1e-9) and m["stale_gradient"] == 0
    assert m["advantage_correlation"] == pytest.approx(1.) and m["prompts_given"] == m["distinct_prompts"] == 4


@pytest.mark.parametrize("factor", [-1., .5, 3.])
def test_a_factor_or_a_sign_in_the_loss_is_the_slope(factor):
    class Wrong(RLHFTrainer):
        def loss(self, now, batch):
            loss, parts = super().loss(now, batch)
            return factor * loss, parts

    m = step(made(trainer=Wrong))
    assert m["policy_gradient_scale"] == pytest.approx(factor) == m["value_gradient_scale"]
    assert m["policy_gradient_cosine"] == pytest.approx(factor / abs(factor))


def test_a_gradient_that_stays_and_a_step_that_does_not():
    class Kept(RLHFTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.optimizer.zero_grad = lambda *args, **kwargs: None

    assert step(made(trainer=Kept))["stale_gradient"] > 1e-4
    still = step(made(optimizer=lambda groups: torch.optim.SGD([g | {"lr": 0.} for g in groups])))
    assert still["weights_moved"] == 0 == still["update_ratio"] == still["kl_to_old_exact"] and still["lr"] == 0
    moved = step(made())
    assert moved["weights_moved"] > .95 and 1e-4 < moved["update_ratio"] < .1  # Adam's steps of .001, four, beside weights of .3
    half = step(made(dtype=torch.bfloat16, lr=1e-5))
    assert half["weights_moved"] < .3 and half["rounding"] == 2**-7


def test_of_frozen_weights_nothing_is_said():
    net = torch.nn.Linear(2, 2).requires_grad_(False)
    assert all(x.isnan() for x in weight_meter(net)().values())
    large = torch.nn.Linear(600, 600)   # more than are looked at
    changed = weight_meter(large)
    large.weight.grad, large.bias.grad = torch.ones(600, 600), None
    with torch.no_grad(): large.weight[:300] += 1
    assert changed()["weights_moved"] == pytest.approx(.5, abs=.01)


# --- returns and values -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gamma, lam", [(1., .95), (.9, .5), (.7, 0.), (1., 1.), (0., .5)])
def test_the_returns_say_what_they_were_made_with(gamma, lam):
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1))
    rewards, values = (torch.randn(40, 7) * mask for _ in range(2))
    r = Rollout(mask.long(), mask, mask.long(), mask, rewards=rewards, values=values)
    r.advantages, r.returns = gae(rewards, values, mask, gamma, lam)
    found = discounts(r)
    assert found[0].item() == pytest.approx(gamma, abs=1e-4)
    if gamma: assert found[1].item() == pytest.approx(lam, abs=1e-4)
    r.returns = values.clone()          # undetermined, and not a guess
    assert discounts(r)[0].isnan()
    r.values = torch.zeros_like(values)
    assert discounts(r)[0].isnan()


def test_correlation_against_numpy_and_of_what_does_not_vary():
    x, y = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.arange(50.)
    assert correlation(x, y).item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    for flat in (torch.full((50,), .1), torch.full((50,), 1e8), torch.zeros(50)): assert correlation(x, flat).isnan()


def test_distinct_rows_are_counted_whatever_stands_in_the_padding():
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    ids = torch.tensor([[1, 2, 5], [1, 2, 7], [1, 2, 0], [1, 2, 2]])
    r = Rollout(ids, mask, ids, mask, scores=torch.tensor([2., 2., 3., 1.]))
    found = of_texts(r)
    assert found.pop("score_length_correlation").item() == pytest.approx(1.) and found == {"distinct_prompts": 3, "distinct_responses": .75, "distinct_2": .5}


# --- prompts ----------------------------------------------------------------------------------------------------------
def test_prompts_are_guessed_by_a_model_without_knowledge_and_read_one_by_one():
    t = made()
    r = t.rollout(PROMPTS * 2)
    one_by_one = []
    for prompt in PROMPTS:
        ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
        logp = t.ref_model(ids).logits[0].log_softmax(-1)
        one_by_one += [-logp[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1)]
    assert prompt_nll(t.ref_model, r).item() == pytest.approx(np.mean(one_by_one) / np.log(len(TOKENIZER)), rel=1e-6)
    blank = create_reference_model(t.agent)
    torch.nn.init.zeros_(blank.transformer.wte.weight)
    assert prompt_nll(blank, r).item() == pytest.approx(1., abs=1e-6)
    assert prompt_nll(t.ref_model, t.rollout([""])).isnan()  # one token: nothing to predict


# --- asked again ------------------------------------------------------------------------------------------------------
def noisy(texts): return [x + torch.rand(()).item() + np.random.rand() for x in even(texts)]  # the shape checker plays with Python's


@pytest.mark.parametrize("reward", [even, noisy])
def test_asking_again_changes_no_number_of_the_run(reward):
    logs = []
    for again in (False, True):
        t = made(callbacks=[RecheckRewards(reward, rows=3)] if again else [])
        torch.manual_seed(3); np.random.seed(3)  # the reward's own dice, which are global
        logs.append([{k: x for k, x in t.step(PROMPTS * 2, reward).items() if "second" not in k} for _ in range(3)])
    for alone, asked in zip(*logs, strict=True):
        found = {k: asked.pop(k) for k in ("reward_noise", "reward_shift")}
        assert alone == asked
        assert found["reward_noise"] > .01 if reward is noisy else found == {"reward_noise": 0, "reward_shift": 0}


@pytest.mark.parametrize("every", [None, 2])
def test_a_run_asks_again_as_often_as_its_setting_says(every):
    calls = []

    def counted(texts):
        calls.append(len(texts))
        return even(texts)

    log = made(recheck_every=every, steps=4).train(PROMPTS, counted, progress=False)
    alone = made(steps=4).train(PROMPTS, even, progress=False)
    asked = {m["iteration"]: (m.pop("reward_noise"), m.pop("reward_shift")) for m in log if "reward_noise" in m}
    assert asked == ({} if every is None else {0: (0, 0), 2: (0, 0)}) and calls == ([8] * 4 if every is None else [8, 8, 8, 8] * 2)
    same = [[{k: x for k, x in m.items() if "second" not in k} for m in each] for each in (log, alone)]
    assert same[0] == same[1]


def test_the_doctor_reads_an_answer_now_and_then():
    def by_place(texts): return [x + 3. * (i % 3) for i, x in enumerate(even(texts))]

    c = dict(recheck_every=2, steps=3)
    found = diagnose(made(**c).train(PROMPTS, by_place, progress=False), vars(RLHFConfig(**c)))
    assert [f.evidence.split(" in ")[1] for f in found if f.name == "reward of other rows"] == ["2 of 2 iterations, first"]


def test_slipped_rows_show_in_another_order_alone():
    class Slipped(RLHFTrainer):
        def judge(self, rollout, reward_fn, kind="text"): return super().judge(rollout, reward_fn, kind).roll(1)

    m = step(made(trainer=Slipped, callbacks=[RecheckRewards(even)]))
    assert m["reward_noise"] == 0 and m["reward_shift"] > .5


def test_dice_are_put_back_after_an_error_too():
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    with pytest.raises(ZeroDivisionError), generators_kept():
        random.random(); torch.rand(3); np.random.rand(3)
        raise ZeroDivisionError
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1]) and np.random.get_state()[1].tolist() == before[2]


def test_the_samplers_kl_is_that_of_three_tokens_and_the_mean_weight_says_only_what_the_cap_took():
    """Ten tokens drawn from μ = (.6, .3, .1) in just these shares, so a mean over them is an expectation under μ. By hand: with π_old = (.5, .25, .25)
    E[w] = Σπ = 1; capped at 2 it is .5 + .25 + .1·2 = .95; and the KL is Σ μ log(μ/π)."""
    mu, pi = (.6, .3, .1), (.5, .25, .25)
    tokens = torch.tensor([[0, 0, 0, 1, 2, 1, 2], [0, 1, 0, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 0]]).bool()
    assert [int((tokens[mask] == a).sum()) for a in range(3)] == [6, 3, 1]
    sampled, old = (torch.tensor(p, dtype=torch.float64).log()[tokens] for p in (mu, pi))
    for poison in (0., 50., -200., math.nan):
        r = Rollout(tokens, mask, tokens, mask, sampled_logprobs=torch.where(mask, sampled, poison), old_logprobs=torch.where(mask, old, -poison))
        for cap, weight in ((None, None), (2., .95), (1e3, 1.)):
            m = of_sampler(r, RLHFConfig(importance_cap=cap))
            assert m["sampler_kl"].item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(mu, pi)), rel=1e-12)
            assert m["max_sampler_deviation"].item() == pytest.approx(1.5) and (weight is None or m["importance_mean"].item() == pytest.approx(weight))
    assert of_sampler(Rollout(tokens, mask, tokens, mask, sampled_logprobs=sampled, old_logprobs=sampled), RLHFConfig())["sampler_kl"] == 0
