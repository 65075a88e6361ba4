"""Numbers of a rollout and of an update, each against a second way to know it.

The other ways are plain forward passes, sums by hand, and other formulas.
"""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from deep import first
from small_trainer import (
    EOS,
    FOUR,
    PROMPTS,
    SHORT,
    TOKENIZER,
    config,
    even,
    experience,
    kl_by_hand,
    made,
    ready,
    reward,
    rows,
    step,
    tiny,
    trainer,
)

import instruct_goose.training.metrics as module
from instruct_goose.config import RLHFConfig
from instruct_goose.core.tensor_checks import LostSteps
from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.sharding import full_gradients
from instruct_goose.models.tokens import pad
from instruct_goose.objective.advantages import gae
from instruct_goose.objective.group import PRESETS
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.metrics import (
    PolicyChange,
    correlation,
    estimate_discounts,
    policy_inputs,
    progress_line,
    prompt_metrics,
    prompt_nll_ratio,
    ratio_metrics,
    rollout_metrics,
    sample_weights,
    sampler_metrics,
    sparkline,
    weight_changes,
)
from instruct_goose.training.trainer import RLHFTrainer


@pytest.mark.parametrize("micro", first(1, [3, None, 1]))
@pytest.mark.parametrize("algorithm", PRESETS)
def test_the_loss_of_every_preset_has_the_gradients_of_the_equations(algorithm, micro):
    m = step(made(algorithm=algorithm, micro_batch_size=micro, minibatches=1, ent_coef=0.03))
    names = ["policy_gradient_scale", "policy_gradient_cosine", "entropy_gradient_scale"]
    if algorithm == "ppo":
        names += ["value_gradient_scale", "value_gradient_cosine"]
    assert [m[name] for name in names] == pytest.approx([1.0] * len(names), abs=1e-9)
    assert m["stale_gradient"] == 0
    assert m["advantage_correlation"] == pytest.approx(1.0)
    assert m["prompts_given"] == m["distinct_prompts"] == 4


@pytest.mark.parametrize("factor", [-1.0, 0.5, 3.0])
def test_a_factor_or_a_sign_in_the_loss_is_the_slope(factor):
    class Wrong(RLHFTrainer):
        def loss(self, new, batch):
            loss, parts = super().loss(new, batch)
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
    still = step(made(optimizer=lambda groups: torch.optim.SGD([g | {"lr": 0.0} for g in groups])))
    assert still["weights_moved"] == still["update_ratio"] == still["kl_to_old_exact"] == 0
    assert still["lr"] == 0
    moved = step(made())
    assert moved["weights_moved"] > 0.95
    assert 1e-4 < moved["update_ratio"] < 0.1  # Adam's steps of .001, four, beside weights of .3
    with pytest.warns(LostSteps):
        half = made(dtype=torch.bfloat16, lr=1e-5)
    log = step(half)
    assert log["weights_moved"] < 0.3
    assert log["rounding"] == 2**-7


def test_of_many_weights_a_sample_is_compared():
    large = torch.nn.Linear(600, 600)
    learn = list(large.parameters())
    before = sample_weights(learn)
    large.weight.grad = torch.ones(600, 600)
    with torch.no_grad():
        large.weight[:300] += 1
    changes = weight_changes(learn, full_gradients(large, learn), before)
    assert sum(map(len, before)) < 2**16 + 600
    assert changes["weights_moved"] == pytest.approx(0.5, abs=0.01)
    assert changes["tensors_without_gradient"] == 0.5
    assert changes["tensors_unmoved"] == 0
    assert changes["clipped_grad_norm"] == pytest.approx(600.0)


def test_of_a_frozen_policy_no_change_of_weights_is_logged():
    t = made()
    t.agent.model.requires_grad_(False)
    change = PolicyChange(t.agent, t.rollout(FOUR * 2), t.config)
    t.agent.value_head.weight.grad = torch.ones_like(t.agent.value_head.weight)
    assert set(change.metrics()) == {"kl_to_old_exact", "value_weight_change_rms"}


def test_without_an_update_no_gradient_of_an_earlier_one_is_logged():
    t = made(advantage="group_mean", group_size=4, drop_flat_groups=True)
    first = t.step(FOUR[:2], lambda texts: [float(i) for i in range(len(texts))])
    flat = t.step(FOUR[:2], lambda texts: [0.0] * len(texts))
    assert first["updates"] > 0
    assert first["clipped_grad_norm"] > 0
    assert flat["updates"] == 0
    assert flat["clipped_grad_norm"] is None
    assert flat["tensors_unmoved"] is None


@pytest.mark.parametrize("gamma, lam", [(0.9, 0.5), (0.7, 0.0), (0.0, 0.5)])
def test_the_returns_say_what_they_were_made_with(gamma, lam):
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1))
    rewards, values = (torch.randn(40, 7) * mask for _ in range(2))
    _, returns = gae(rewards, values, mask, gamma, lam)
    found_gamma, found_lam = estimate_discounts(rewards, values, returns, mask)
    assert found_gamma.item() == pytest.approx(gamma, abs=1e-4)
    if gamma:
        assert found_lam.item() == pytest.approx(lam, abs=1e-4)


def test_discounts_that_are_undetermined_are_nan_and_not_a_guess():
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.randint(2, 8, (40, 1))
    rewards, values = (torch.randn(40, 7) * mask for _ in range(2))
    assert all(x.isnan() for x in estimate_discounts(rewards, values, values, mask))
    no_values = torch.zeros_like(values)
    assert estimate_discounts(rewards, no_values, values, mask)[0].isnan()


def test_correlation_against_numpy_and_of_what_does_not_vary():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50.0)
    assert correlation(x, y).item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    for flat in (torch.full((50,), 0.1), torch.full((50,), 1e8), torch.zeros(50)):
        assert correlation(x, flat).isnan()


def test_prompts_are_guessed_by_a_model_without_knowledge_and_read_one_by_one():
    t = made()
    r = t.rollout(FOUR * 2)
    one_by_one = []
    for prompt in FOUR:
        ids = torch.tensor([SHORT(prompt)["input_ids"]])
        logp = t.ref_model(ids).logits[0].log_softmax(-1)
        one_by_one += [-logp[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1)]
    assert prompt_nll_ratio(t.ref_model, r).item() == pytest.approx(
        np.mean(one_by_one) / np.log(len(SHORT)), rel=1e-6
    )
    blank = create_reference_model(t.agent)
    torch.nn.init.zeros_(blank.transformer.wte.weight)
    assert prompt_nll_ratio(blank, r).item() == pytest.approx(1.0, abs=1e-6)
    assert prompt_nll_ratio(t.ref_model, t.rollout([""])).isnan()  # one token: nothing to predict


def test_the_samplers_kl_is_that_of_three_tokens_and_the_mean_weight_says_only_what_the_cap_took():
    """Ten tokens in just the shares of μ = (.6, .3, .1): a mean is an expectation under μ.

    By hand: with π_old = (.5, .25, .25) E[w] = Σπ = 1; capped at 2 it is .5 + .25 + .1·2 = .95;
    and the KL is Σ μ log(μ/π).
    """
    mu, pi = (0.6, 0.3, 0.1), (0.5, 0.25, 0.25)
    tokens = torch.tensor([[0, 0, 0, 1, 2, 1, 2], [0, 1, 0, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 0]]).bool()
    assert [int((tokens[mask] == a).sum()) for a in range(3)] == [6, 3, 1]
    sampled, old = (torch.tensor(p, dtype=torch.float64).log()[tokens] for p in (mu, pi))
    kl = sum(a * math.log(a / b) for a, b in zip(mu, pi, strict=True))
    for poison in (0.0, 50.0, -200.0, math.nan):
        r = experience(
            tokens,
            mask,
            tokens,
            mask,
            sampled_logprobs=torch.where(mask, sampled, poison),
            old_logprobs=torch.where(mask, old, -poison),
        )
        for cap, weight in ((None, None), (2.0, 0.95), (1e3, 1.0)):
            m = sampler_metrics(r, RLHFConfig(importance_cap=cap))
            assert m["sampler_kl"].item() == pytest.approx(kl, rel=1e-12)
            assert m["max_sampler_deviation"].item() == pytest.approx(1.5)
            if weight is not None:
                assert m["importance_mean"].item() == pytest.approx(weight)
    same = experience(tokens, mask, tokens, mask, sampled_logprobs=sampled, old_logprobs=sampled)
    assert sampler_metrics(same, RLHFConfig())["sampler_kl"] == 0


@pytest.mark.parametrize(
    "changes,seen",
    [
        (dict(), range(8)),
        (dict(micro_batch_size=3, temperature=1.4), range(8)),
        (dict(batch_size=24), range(0, 24, 3)),
        (dict(batch_size=80), range(0, 80, 10)),
    ],
    ids=str,
)
def test_the_exact_distance_that_an_iteration_goes(changes, seen):
    t = trainer(**changes)
    r = ready(t, prompts=(PROMPTS * 10)[: t.config.batch_size])
    assert not r.mask.all()
    old = copy.deepcopy(t.agent.model)
    m = t.optimize(r)
    queries, responses = rows(r)
    compared = ([x[i] for i in seen] for x in (queries, responses))
    exact = kl_by_hand(old, t.agent.model, *compared, t.config.temperature)
    assert m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6)
    assert m["kl_to_old_exact"] > 1e-3


@pytest.mark.parametrize(
    "size, seen", [(6 * 11 * 8, range(8)), (6 * 11 * 3, range(0, 8, 3)), (6 * 11 - 1, None)]
)
def test_the_larger_the_vocabulary_the_fewer_responses_are_compared(monkeypatch, size, seen):
    t = trainer()
    r = ready(t)
    assert r.mask.shape == (8, 6)  # and eleven tokens
    monkeypatch.setattr(module, "MAX_TABLE_SIZE", size)
    old = copy.deepcopy(t.agent.model)
    m = t.optimize(r)
    if seen is None:
        assert m["kl_to_old_exact"] is None
        return
    queries, responses = rows(r)
    compared = ([x[i] for i in seen] for x in (queries, responses))
    exact = kl_by_hand(old, t.agent.model, *compared)
    assert m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6)


def scored(t, scores):
    "A rollout whose scores are set by hand."
    r = t.rollout((PROMPTS * 4)[: len(scores) // t.config.group_size])
    r.scores = torch.tensor(scores, dtype=torch.float64)
    return rollout_metrics(t.advantages(r), t.config)


SCORES = [1.0, 3.0, 2.0, 2.0, 0.0, 4.0, 5.0, 5.0]


# the pairs' standard deviations by n − 1 are √2, 0, 2√2, 0; by n they are 1, 0, 2, 0
@pytest.mark.parametrize("ddof, std", [(1, 3 * math.sqrt(2) / 4), (0, 0.75)])
def test_rewards_of_groups_by_hand(ddof, std):
    m = scored(trainer(algorithm="grpo", group_size=2, group_ddof=ddof), SCORES)
    assert (m["reward_min"], m["reward_max"], m["flat_groups"]) == (0.0, 5.0, 0.5)
    assert m["group_reward_std"] == pytest.approx(std)


def test_rewards_of_larger_groups_by_hand():
    scores = [1.0, 1.0, 1.0, 2.0, -3.0, -3.0, -3.0, -3.0]  # standard deviations ½ and 0
    m = scored(trainer(algorithm="rloo", group_size=4), scores)
    assert (m["reward_min"], m["reward_max"], m["flat_groups"]) == (-3.0, 2.0, 0.5)
    assert m["group_reward_std"] == pytest.approx(0.25)
    assert scored(trainer(algorithm="grpo", group_size=4), [0.1] * 8)["flat_groups"] == 1.0


def test_without_groups_their_rewards_are_not_defined():
    m = scored(trainer(), SCORES)
    assert m["group_reward_std"] is None
    assert m["flat_groups"] is None
    assert (m["reward_min"], m["reward_max"]) == (0.0, 5.0)


@pytest.mark.parametrize("level,largest", [("token", 0.9), ("sequence", 0.25), ("product", 0.5)])
def test_the_largest_ratio_is_that_of_real_tokens_at_the_level_of_the_loss(level, largest):
    t = trainer(ratio_level=level)
    query_ids, query_mask = pad([[0, 5], [0], [0, 4]], EOS, side="left")
    ids, mask = pad([[3, 4], [5, 6, 2], [7, 8]], EOS, side="right")
    moved = torch.tensor(
        [[0.1, 0.4, 3.0], [0.9, -0.8, 0.1], [-0.2, -0.3, 3.0]], dtype=torch.float64
    )  # the threes are padding
    old = torch.full_like(moved, -2.0)
    r = experience(
        query_ids, query_mask, ids, mask, old_logprobs=old, advantages=torch.ones_like(old)
    )

    def largest_ratio(rows):
        return ratio_metrics((old + moved)[rows], r[rows], t.config)["ratio_max"].item()

    assert largest_ratio([0, 1, 2]) == pytest.approx(math.exp(largest))
    # in the last row all are below 1, and the padding is not a token
    below_one = {"token": -0.2, "sequence": -0.25, "product": -0.5}[level]
    assert largest_ratio([2]) == pytest.approx(math.exp(below_one))


def test_the_metrics_of_a_run_are_json_and_are_told_to_the_callback():
    told = []
    t = trainer(lr=1e-3)
    history = t.train(PROMPTS, reward, steps=3, callback=told.append, progress=False)
    assert told == history == json.loads(json.dumps(history))
    assert [m["iteration"] for m in history] == [0, 1, 2]


def test_the_metrics_of_a_rollout_are_sums_over_its_tokens():
    model, ref_model = (tiny(seed=seed, dtype=torch.float32) for seed in (0, 1))
    t = trainer(model=model, ref_model=ref_model)
    r = ready(t)
    m = rollout_metrics(r, t.config, t.eos_ids)
    places = r.mask.nonzero().tolist()
    log_ratios = [(r.old_logprobs - r.ref_logprobs)[i, k].item() for i, k in places]
    k3 = sum(math.exp(-x) - 1 + x for x in log_ratios)
    assert m["kl_estimate"] == pytest.approx(k3 / 8, rel=1e-4)
    assert m["kl_to_reference"] == pytest.approx(r.kl.sum().item() / 8)
    lengths = [row.sum().item() for row in r.mask]
    assert m["tokens"] == sum(lengths)
    assert m["response_length"] == pytest.approx(sum(lengths) / 8)
    ended = [r.response_ids[i, n - 1].item() == EOS for i, n in enumerate(lengths)]
    assert 0 < sum(ended) < 8
    assert m["finished"] == pytest.approx(sum(ended) / 8)
    rewards = reward(r.texts)
    assert m["reward_mean"] == pytest.approx(sum(rewards) / 8)
    assert m["reward_std"] == pytest.approx(torch.tensor(rewards).std().item(), abs=1e-6)
    entropies = [r.entropy[i, k].item() for i, k in places]
    assert m["entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
    returns = r.returns[r.mask]
    errors = returns - r.values[r.mask]
    explained = 1 - (errors.var() / returns.var()).item()
    assert m["explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert m["return_mean"] == pytest.approx(returns.mean().item(), abs=1e-5)
    assert m["advantage_std"] == pytest.approx(errors.std(unbiased=False).item(), abs=1e-5)
    assert m["total_reward_mean"] == pytest.approx(r.rewards.sum().item() / 8, abs=1e-5)


def test_the_metrics_of_the_update_describe_the_policy_before_each_step():
    settings = dict(minibatches=1, epochs=2, lr=0.02, clip=0.1, clip_high=0.3)
    t = RLHFTrainer(tiny(), config=config(**settings), tokenizer=TOKENIZER)
    r = ready(t)
    start = copy.deepcopy(t.agent.state_dict())
    m = t.optimize(r)
    t.agent.load_state_dict(start)
    one_epoch = dataclasses.replace(t.config, epochs=1)
    again = RLHFTrainer(t.agent, config=one_epoch, tokenizer=TOKENIZER)
    one = again.optimize(r)  # the same first step; what the second sees is the policy after it
    after = t.agent.evaluate(r.query_ids, r.query_mask, r.response_ids, r.mask).logprobs.detach()
    k3, low, high = 0.0, 0, 0
    for i, k in r.mask.nonzero().tolist():
        log_ratio = (after[i, k] - r.old_logprobs[i, k]).item()
        ratio = math.exp(log_ratio)
        advantage = r.advantages[i, k].item()
        k3 += ratio - 1 - log_ratio  # k3 of KL(old, new), sampled from old
        low += ratio < 0.9 and advantage < 0
        high += ratio > 1.3 and advantage > 0
    n = r.mask.sum().item()
    assert low and high
    assert one["kl_to_old"] == one["clip_fraction"] == 0  # before the first step nothing has moved
    assert m["kl_to_old"] == pytest.approx(k3 / 8 / 2)
    assert m["clip_fraction_low"] == pytest.approx(low / n / 2)
    assert m["clip_fraction_high"] == pytest.approx(high / n / 2)
    assert m["clip_fraction"] == pytest.approx((low + high) / n / 2)


PROMPTS_READ = ["<user> The film is </user>", "the plot", "was dull"]


@pytest.mark.parametrize(
    "prompts, share",
    [
        (["the film  is"], 1.0),  # inside a template
        (["was dull", "the plot"], 1.0),  # in any order
        (["the plot was"], 0.0),  # two prompts make this text together
        (["the plot", "the plot was thin"], 0.5),  # a piece is not the whole
    ],
)
def test_the_share_of_prompts_whose_text_arrived_whole(prompts, share):
    r = dataclasses.replace(made().rollout(PROMPTS), prompts=PROMPTS_READ)
    assert prompt_metrics(prompts, r)["prompts_kept"] == share


def test_a_prompt_that_writes_out_special_tokens_arrived_whole():
    r = dataclasses.replace(made().rollout(PROMPTS), prompts=["user who? robot", "was"])
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|turn|>end"]})
    prompts = ["<|turn|>user who?<|turn|>end robot", "was<|turn|>", "was dull<|turn|>"]
    assert prompt_metrics(prompts, r, tokenizer=tokenizer)["prompts_kept"] == 2 / 3
    assert prompt_metrics(prompts, r)["prompts_kept"] == 0


def test_chats_and_rows_have_a_text_and_token_ids_have_none():
    r = dataclasses.replace(made().rollout(PROMPTS), prompts=PROMPTS_READ)
    chat = [{"role": "user", "content": "The film is"}]
    assert prompt_metrics([chat, {"prompt": "the score"}], r) == {
        "prompts_given": 2,
        "prompts_kept": 0.5,
        "prompts_held_out": None,
    }
    assert prompt_metrics({"query_ids": r.query_ids}, r) == {
        "prompts_given": 8,
        "prompts_kept": None,
        "prompts_held_out": None,
    }


@pytest.mark.parametrize(
    "held_out, share",
    [
        (["the score"], 0.5),
        ([{"prompt": "the score", "answer": "8"}], 0.5),  # other columns are not read
        ([{"prompt": "the score", "chat_template_kwargs": {"a": 1}}], 0.0),  # these are
        (["the scores"], 0.0),
    ],
)
def test_a_prompt_is_held_out_where_the_policy_reads_the_same(held_out, share):
    r = dataclasses.replace(made().rollout(PROMPTS), prompts=PROMPTS_READ)
    given = ["the film is", {"prompt": "the score", "answer": "7"}]
    held = frozenset(policy_inputs(held_out))
    assert prompt_metrics(given, r, held)["prompts_held_out"] == share


def test_a_history_is_a_list_that_shows_a_table():
    t = made(algorithm="grpo", steps=3)
    history = t.train(FOUR, even, progress=False)
    assert isinstance(history, list)
    assert len(history) == 3
    assert history == [*history]
    line = next(x for x in repr(history).splitlines() if x.startswith("reward_mean"))
    assert f"{history[0]['reward_mean']:.3g}" in line
    assert f"{history[-1]['reward_mean']:.3g}" in line
    assert "grpo, 3 of 3 iterations done. GPT2LMHeadModel on cpu" in repr(t)
    assert len(repr(t)) < 600


def test_a_sparkline_has_eight_heights_and_forty_bars():
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([3.0] * 100) == "▁" * 34


def test_an_experience_is_shown_coloured_by_the_sign_of_the_advantage():
    t = made(algorithm="grpo")
    r = ready(t, even, FOUR)
    html = r._repr_html_()
    assert html.count("rgba(0,150,80") == sum(a > 0 for a in r.advantages.sum(-1).tolist()) > 0
    assert html.count("<tr>") == 9
    assert repr(r.texts[2].removeprefix(r.prompts[2])[:60]) in repr(r)
    assert "Rollout of 8" in repr(r)
    assert "Rollout of 1" in repr(r[3])


def test_texts_are_escaped_where_a_notebook_shows_them():
    one = torch.ones(1, 1)
    r = Rollout(one.long(), one.bool(), one.long(), one.bool(), texts=["<b>"])
    assert "<b>" not in r._repr_html_()


def test_a_line_tells_what_is_known():
    "300 tokens in 2 + 1 + 3 seconds are 50 a second."
    m = {
        "reward_mean": 0.254,
        "kl_to_reference": 1.0,
        "held_out_reward": None,
        "clip_fraction": 0.256,
        "tokens": 300,
        "seconds_rollout": 2.0,
        "seconds_score": 1.0,
        "seconds_optimize": 3.0,
    }
    assert progress_line(m) == "reward 0.25, KL 1.00, clipped 26%, 50 tokens/s"
    assert progress_line({"entropy": 2.0, "tokens": 300}) == "entropy 2.00"


def test_a_metric_of_the_update_is_the_plain_mean_over_uneven_minibatches():
    "Eight responses in minibatches of three, three and two: each step weighs a third."
    sizes, losses, kls = [], [], []

    class ByHand(RLHFTrainer):
        def update(self, batch, is_first=False):
            with torch.no_grad():
                new = self.evaluate_tokens(batch)
            mask = batch.mask
            sizes.append(len(batch))
            losses.append((new.values - batch.returns)[mask].double().square().mean() / 2)
            ratio = (new.logprobs - batch.old_logprobs).double()
            kls.append((ratio.exp() - 1 - ratio)[mask].sum() / len(batch))
            return super().update(batch, is_first)

    t = trainer(
        ByHand, batch_size=8, minibatches=3, epochs=1, lr=1e-2, value_clip=None, group_size=1
    )
    metrics = t.step(PROMPTS[:1] * 8, reward)
    assert sorted(sizes) == [2, 3, 3]
    assert metrics["value_loss"] == pytest.approx(sum(losses).item() / 3, rel=1e-5)
    assert metrics["kl_to_old"] == pytest.approx(sum(kls).item() / 3, rel=1e-3, abs=1e-9)
    assert metrics["kl_to_old"] > 0


def test_an_iteration_without_a_row_to_learn_from_has_no_metrics_of_steps():
    class NoneEnds(Callback):
        def on_rollout(self, trainer, rollout):
            rollout.ended = torch.zeros(len(rollout), dtype=torch.bool)

    t = trainer(mask_truncated=True, weight_decay=0.5, callbacks=[NoneEnds()])
    before = [p.detach().clone() for p in t.agent.parameters()]
    metrics = t.step(PROMPTS[:1] * t.config.batch_size, reward)
    assert metrics["updates"] == 0 and metrics["update_ratio"] is None
    assert not {"policy_loss", "clip_fraction", "grad_norm", "kl_to_old"} & metrics.keys()
    assert all(torch.equal(a, b) for a, b in zip(before, t.agent.parameters(), strict=True))
