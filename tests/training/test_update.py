"""What reaches the loss, the KL coefficient, the optimizer and the limit of a run.

One number of each is worked out by hand.
"""

import copy
import math
import warnings

import jaxtyping
import pytest
import torch
import transformers
from small_trainer import experience

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent, Evaluation
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.rollouts.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.training.update import (
    Coefficients,
    add_gradient,
    clip_gradients,
    kl_penalty_in_loss,
    micro_batches,
    minibatches,
    next_learning_rate,
)

TOKENIZER = word_tokenizer([f"w{i}" for i in range(9)], 20, pad="<end>", bos="<end>", eos="<end>")
EOS = TOKENIZER.eos_token_id
PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2"]


def tiny(seed=0):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(TOKENIZER),
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=20,
            bos_token_id=EOS,
            eos_token_id=EOS,
        )
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.double()


def trainer(algorithm="ppo", cls=RLHFTrainer, models=None, **changes):
    policy, ref_model = models or (tiny(), tiny(1))
    settings = dict(device="cpu", batch_size=4, max_new_tokens=4, minibatches=1) | changes
    config = RLHFConfig.preset(algorithm, **settings)
    return cls(Agent(policy), ref_model, config, tokenizer=TOKENIZER)


def number(x):
    return torch.tensor([[x]], dtype=torch.float64)


def one_token(old_logprobs=-1.0, ref_logprobs=-1.0, **columns):
    "An experience of one response of one token, of which these things are known."
    there = torch.ones(1, 1, dtype=torch.bool)
    ids = torch.zeros(1, 1, dtype=torch.long)
    known = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs} | columns
    return experience(ids, there, ids, there, **{name: number(x) for name, x in known.items()})


def loss_of_one(t, logprob=-1.0, value=0.0, **columns):
    if t.config.needs == "values":
        batch = one_token(**{"values": 0.0, "returns": 0.0} | columns)
        new = Evaluation(number(logprob), None, number(value))
    else:
        batch = one_token(**columns)
        new = Evaluation(number(logprob), None, None)
    loss, _ = t.loss(new, batch)
    return loss.item()


@pytest.mark.parametrize(
    "value_clip,loss", [(0.2, 0.5 * 0.8**2 / 2), (0.3, 0.5 * 0.7**2 / 2), (None, 0.0)]
)
def test_the_value_may_go_value_clip_from_the_value_before_the_update(value_clip, loss):
    """It has gone from 0 to its return, 1: no error at all, but with the clip there is one.

    It is max(0, (V_old + clip − R̂)²)/2, and c₁ is ½.
    """
    t = trainer(value_clip=value_clip)
    assert loss_of_one(t, value=1.0, returns=1.0) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("beta_at_the_start", [0.1, 0.0])
def test_the_kl_in_the_loss_is_multiplied_by_the_current_coefficient(beta_at_the_start):
    settings = dict(kl_placement="loss", kl_estimator="k2", beta=beta_at_the_start)
    t = trainer("grpo", group_size=2, **settings)
    for beta in (0.1, 0.7, 0.0):
        t.beta = beta
        # k2 of a log-ratio of 2 is 2²/2
        assert loss_of_one(t, ref_logprobs=-3.0) == pytest.approx(beta * 2, abs=1e-12)


def k3(log_ratios):
    return sum(math.exp(x) - 1 - x for x in log_ratios) / len(log_ratios)


def steps_of_cleanrl(epochs, target):
    """The steps that CleanRL 1.2.0 would make: ppo.py lines 246–290.

    It looks at the mean of k3 over the actions of the last minibatch when an epoch is over.
    """
    steps = 0
    for epoch in epochs:
        steps += len(epoch)
        if k3(epoch[-1]) > target:
            break
    return steps


def steps_of_sb3(epochs, target):
    """The steps that Stable-Baselines3 2.9.2 would make: ppo.py lines 260–271.

    It looks at the same mean before each step, and does not make one above 1.5 × target.
    """
    steps = 0
    for epoch in epochs:
        for log_ratios in epoch:
            if k3(log_ratios) > 1.5 * target:
                return steps
            steps += 1
    return steps


def log_ratios_before_each_step(minibatches, limit):
    "log π − log π_old of the tokens of each minibatch of an iteration that ends at the limit."
    seen = []

    class Watched(RLHFTrainer):
        def update(self, batch, is_first=False):
            logprobs = self.evaluate_tokens(batch).logprobs.detach()
            seen.append((logprobs - batch.old_logprobs)[batch.mask].tolist())
            return super().update(batch, is_first)

    t = trainer(
        cls=Watched,
        max_new_tokens=1,
        minibatches=minibatches,
        epochs=5,
        lr=0.02,
        max_kl_to_old=limit,
    )
    t.step(PROMPTS, lambda texts: [float(len(x) + 3 * i) for i, x in enumerate(texts)])
    return seen


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_early_stop_beside_two_peers(minibatches):
    """With responses of one token, nats per response are nats per action.

    Ours makes the step before which it measured too much, as CleanRL does with one minibatch per
    epoch (with more, that one finishes its epoch). Stable-Baselines3 makes one step less, at
    1.5 × its target.
    """
    every = log_ratios_before_each_step(minibatches, None)
    epochs = [every[i : i + minibatches] for i in range(0, len(every), minibatches)]
    assert len(epochs) == 5
    assert every[0] == pytest.approx([0.0] * len(every[0]), abs=1e-9)
    measured = [k3(log_ratios) for log_ratios in every]
    for i in range(1, len(every) - 1):
        target = measured[i] * 0.999  # the first of these to be above it ends the iteration
        too_far = [n for n, x in enumerate(measured) if x > target]
        ours = len(log_ratios_before_each_step(minibatches, target))
        theirs = steps_of_cleanrl(epochs, target)
        assert ours == too_far[0] + 1
        assert ours == theirs if minibatches == 1 else ours <= theirs
        assert ours == min(steps_of_sb3(epochs, target / 1.5) + 1, len(every))


# ── coefficients that move ──


def test_without_targets_the_coefficients_stay():
    coefficients = Coefficients(RLHFConfig(beta=0.2, ent_coef=0.01))
    assert coefficients.adapt({"kl_to_reference": 50.0, "entropy": 9.0}) == {}
    state = {"beta": 0.2, "ent_coef": 0.01, "ent_coef_used": None}
    assert coefficients.state_dict() == state


def test_a_kl_above_its_target_raises_beta():
    coefficients = Coefficients(RLHFConfig(beta=0.2, kl_target=5.0))
    coefficients.adapt({"kl_to_reference": 50.0})
    assert coefficients.beta > 0.2


@pytest.mark.parametrize("beta", [-1.0, math.nan, "0.2", None])
def test_a_state_that_is_no_coefficient_is_refused(beta):
    coefficients = Coefficients(RLHFConfig())
    with pytest.raises(ValueError, match="beta"):
        coefficients.check_state_dict({"beta": beta, "ent_coef": 0.0})


# ── responses that were cut off ──


def truncated_rollout():
    "Six responses to two prompts, three of them cut off."
    answers = [[8, 9, EOS], [2, 10, 3, 5, 6, 7], [EOS], [3, EOS], [4, 5, 6, 7, 8, 9], [5] * 6]
    query_ids, query_mask = pad([[0, 5, 7]] * 3 + [[0, 4]] * 3, EOS, side="left")
    response_ids, mask = pad(answers, EOS, side="right")
    scores = torch.tensor([1.5, -2.0, 0.25, 0.5, 3.0, -1.0], dtype=torch.float64)
    return Rollout(query_ids, query_mask, response_ids, mask, scores=scores)


def trainer_of_truncated(**changes):
    settings = dict(
        batch_size=6,
        max_new_tokens=6,
        group_size=3,
        mask_truncated=True,
        epochs=1,
        beta=0.1,
        kl_placement="loss",
        whiten_advantages=False,
    )
    return trainer("grpo", **settings | changes)


def stale_experience(trainer, spread=0.05):
    "The truncated rollout with advantages, of a policy that is not π_old any more."
    batch = trainer.advantages(truncated_rollout())
    noise = torch.randn(
        batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    batch.old_logprobs = batch.old_logprobs + spread * noise * batch.mask
    return batch


def shuffled(trainer, batch):
    shuffling = trainer.generators.shuffling
    return list(minibatches(batch, trainer.config, trainer.eos_ids, shuffling))


def test_truncated_responses_are_compared_with():
    "All six advantages, by hand: (R − mean) / (std + 10⁻⁴) of the group."
    t = trainer_of_truncated()
    batch = t.advantages(truncated_rollout())
    expected = []
    for group in ([1.5, -2.0, 0.25], [0.5, 3.0, -1.0]):
        mean = sum(group) / 3
        std = (sum((x - mean) ** 2 for x in group) / 2) ** 0.5
        expected += [(x - mean) / (std + 1e-4) for x in group]
    assert batch.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [None, 1, 2, "tokens"])
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum", "group_token_mean"])
def test_truncated_responses_give_no_gradient(how, size):
    """By hand: each token's loss of the whole rollout, then the sum over the rows that end.

    It is divided by the N of the equation.
    """
    pieces = {"micro_batch_tokens": 9} if size == "tokens" else {"micro_batch_size": size}
    t = trainer_of_truncated(aggregation=how, **pieces)
    r = stale_experience(t)
    config = t.config
    logprobs = t.evaluate_tokens(r).logprobs
    ratio = (logprobs - r.old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip, 1 + (config.clip_high or config.clip))
    token_losses = kl_penalty_in_loss(logprobs, r, 0.1, config) - torch.minimum(
        ratio * r.advantages, clipped * r.advantages
    )
    each = [token_losses[i][r.mask[i]].sum() for i in range(6)]
    n = r.mask.sum(-1).tolist()
    kept = [0, 2, 3]
    expected = {
        "token_mean": sum(each[i] for i in kept) / (3 + 1 + 2),
        "sequence_mean": sum(each[i] / n[i] for i in kept) / 6,
        "sequence_sum": sum(each[i] for i in kept) / (6 * config.max_new_tokens),
        "group_token_mean": ((each[0] + each[2]) / 4 + each[3] / 2) / 2,
    }[how]
    params = [p for p in t.agent.model.parameters() if p.requires_grad]
    exact = torch.autograd.grad(expected, params, allow_unused=True)

    (batch,) = shuffled(t, r)
    assert sorted(batch.mask.sum(-1).tolist()) == sorted(n[i] for i in kept)
    micros = list(micro_batches(batch, config))
    if size == "tokens":  # 4 and 4 tokens; with the third, of 6, they would be 3 × 6
        assert [len(micro) for micro in micros] == [2, 1]
    t.optimizer.zero_grad()
    for micro in micros:
        add_gradient(t.agent, t.evaluate_tokens, t.loss, micro)
    for p, gradient in zip(params, exact, strict=True):
        if gradient is not None:
            torch.testing.assert_close(p.grad, gradient, atol=1e-9, rtol=1e-6)


def test_a_minibatch_without_an_end_makes_no_step_and_a_run_goes_on():
    t = trainer_of_truncated()
    r = stale_experience(t, spread=0.0)
    before = copy.deepcopy(t.agent.model.state_dict())
    log = t.optimize(r[[1, 4, 5]])
    assert "policy_loss" not in log
    assert all(x.equal(before[name]) for name, x in t.agent.model.state_dict().items())
    assert "policy_loss" in t.optimize(r[[1, 3, 4]])


def test_without_a_known_end_mask_truncated_is_refused():
    t = trainer_of_truncated()
    r = stale_experience(t, spread=0.0)
    t.eos_ids.clear()
    with pytest.raises(ValueError, match="nothing is known to end a response.*stop_token_ids"):
        t.optimize(r)


def test_without_the_setting_truncated_responses_are_learnt_from():
    t = trainer_of_truncated(mask_truncated=False)
    r = stale_experience(t, spread=0.0)
    assert [len(batch) for batch in shuffled(t, r)] == [6]


def test_the_score_of_a_truncated_response_moves_the_loss_of_the_others():
    r = truncated_rollout()
    q = (r.query_ids, r.query_mask, r.response_ids, r.mask)
    loss = trainer_of_truncated().compute_loss(*q, r.scores)
    moved = r.scores.clone()
    moved[1] += 0.5
    assert loss.isfinite()
    assert trainer_of_truncated().compute_loss(*q, moved) != loss


# ── the gradient ──


def test_gradients_are_clipped_to_their_norm_and_the_norm_before_is_returned():
    agent = trainer().agent
    for p in agent.parameters():
        p.grad = torch.ones_like(p)
    size = sum(p.numel() for p in agent.policy_parameters())
    norms = clip_gradients(agent, 0.5)
    assert norms["grad_norm"].item() == pytest.approx(size**0.5)
    clipped = torch.cat([p.grad.flatten() for p in agent.policy_parameters()])
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_is_refused_by_name():
    agent = trainer().agent
    p = next(agent.policy_parameters())
    p.grad = torch.full_like(p, math.inf)
    with pytest.raises(FloatingPointError, match="grad_norm is inf"):
        clip_gradients(agent, 1.0)


@pytest.mark.parametrize("value_model", [None, "copy"])
def test_on_a_shared_transformer_the_value_loss_counts_in_the_policys_norm(value_model):
    """The norm of ∂L/∂θ of the language model, with c₁ = 0 and with c₁ = 50.

    A value function of its own transformer cannot change it; on the policy's it does.
    """
    norms = []
    for vf_coef in (0.0, 50.0):
        config = RLHFConfig(
            device="cpu",
            batch_size=8,
            max_new_tokens=5,
            beta=0.0,
            epochs=1,
            minibatches=1,
            vf_coef=vf_coef,
        )
        t = RLHFTrainer(Agent(tiny().float(), value_model), config=config, tokenizer=TOKENIZER)
        torch.manual_seed(4)
        torch.nn.init.normal_(t.agent.value_head.weight)
        log = t.step(PROMPTS * 2, lambda texts: [float(len(x)) for x in texts])
        assert (log["value_grad_norm"] > 0) == (vf_coef > 0)
        norms.append(log["grad_norm"])
    without, with_values = norms
    if value_model == "copy":
        assert with_values == pytest.approx(without, rel=1e-4)
    else:
        assert with_values > 10 * without


# ── matrix products in bfloat16 ──


def gradients_and_log(rollout, autocast):
    "Of one update on the rollout, with the types of the layers' outputs; then the log of a step."
    dtypes = set()
    t = trainer(
        models=(tiny().float(), tiny(1).float()),
        batch_size=8,
        epochs=1,
        micro_batch_size=3,
        lr=1e-3,
        autocast=autocast,
    )
    for model in (t.agent.model, t.ref_model):
        layer = model.transformer.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _module, _input, output: dtypes.add(output.dtype))
    r = t.advantages(copy.deepcopy(rollout))
    t.update(shuffled(t, r)[0], is_first=True)
    gradients = torch.cat([p.grad.flatten() for p in t.agent.policy_parameters()])
    types_in_the_update = set(dtypes)
    assert {p.dtype for p in t.agent.parameters()} == {torch.float32}
    assert r.old_logprobs.dtype == torch.float32
    log = t.step(PROMPTS * 2, lambda texts: [float(len(x)) for x in texts])
    return gradients, log, types_in_the_update


def test_matrix_products_in_bfloat16_and_weights_as_they_are():
    """A float32 model whose layers' outputs are bfloat16 while writing, judging and learning.

    The gradient points where float32's does.
    """
    sampling = trainer(models=(tiny().float(), tiny(1).float()), batch_size=8)
    rollout = sampling.rollout(PROMPTS * 2)
    rollout.scores = torch.linspace(-1, 1, 8)
    exact, exact_log, exact_dtypes = gradients_and_log(rollout, None)
    rough, rough_log, rough_dtypes = gradients_and_log(rollout, "bfloat16")
    assert exact_dtypes == {torch.float32}
    assert rough_dtypes == {torch.bfloat16}
    assert torch.cosine_similarity(exact, rough, dim=0) > 0.98
    assert exact_log["rounding"] == 2**-23
    assert rough_log["rounding"] == 2**-7
    assert exact_log["max_sampler_deviation"] < 1e-4
    assert rough_log["max_sampler_deviation"] < 0.1  # the sampler rounds too


def test_float16_is_no_autocast():
    error = (ValueError, TypeError)  # a TypeError where annotations are checked
    with pytest.raises(error, match="float16"):
        RLHFConfig(autocast="float16")


# ── parts of a loss of one's own ──


class OwnParts(RLHFTrainer):
    def loss(self, new, batch):
        loss, parts = super().loss(new, batch)
        likely = (new.logprobs.exp() * batch.mask).sum()
        return loss, parts | {"rows": float(len(batch)), "likely": likely}


def step_of(cls, micro_batch_size=None):
    t = trainer(cls=cls, minibatches=2, epochs=1, micro_batch_size=micro_batch_size, seed=2)
    return t.step(PROMPTS, lambda texts: [len(x) for x in texts])


def test_every_part_of_the_loss_is_logged_and_adds_up_over_micro_batches():
    """Two minibatches of two rows: 2 each, however they are cut.

    A sum over rows is that of the minibatch.
    """
    whole = step_of(OwnParts)
    cut = step_of(OwnParts, micro_batch_size=1)
    assert whole["rows"] == cut["rows"] == 2.0
    assert whole["likely"] == pytest.approx(cut["likely"], rel=1e-9)
    assert 0 < whole["likely"] < 8


def test_parts_of_a_loss_of_ones_own_come_beside_the_others():
    own = step_of(OwnParts)
    plain = step_of(RLHFTrainer)
    assert set(own) - set(plain) == {"rows", "likely"}
    assert set(plain) <= set(own)
    assert not {"approx_kl", "ratio_std"} & set(plain)
    # of the rollout, not that of the loss's own call
    assert own["entropy"] == pytest.approx(plain["entropy"])


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(()), (torch.ones(2), {}), (torch.ones(()), torch.ones(()))],
    ids=["a loss alone", "two numbers", "parts without names"],
)
def test_what_a_loss_must_return_is_said(wrong):
    class Wrong(RLHFTrainer):
        def loss(self, new, batch):
            return wrong

    t = trainer(cls=Wrong, epochs=1)
    with pytest.raises(TypeError, match=r"return \(loss, parts\)"):
        t.step(PROMPTS, lambda texts: [len(x) for x in texts])


def test_a_rollout_without_advantages_is_no_experience():
    t = trainer()
    with pytest.raises(jaxtyping.TypeCheckError, match="experience"):
        t.optimize(truncated_rollout())


def test_a_schedule_that_moves_before_the_first_step_does_not_warn():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next_learning_rate(schedule)
    assert optimizer.param_groups[0]["lr"] == 0.5
