"""What reaches the loss, the price of the KL, the optimizer and the limit of a run: one number of each, worked out by hand."""
import pytest
import torch
import transformers

from instruct_goose.models.agent import Agent, Evaluation
from instruct_goose.models.text import pad, word_tokenizer
from instruct_goose.training.annotate import greedy_responses, kl_charge
from instruct_goose.training.callbacks import StopAtKL
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.rollout import Rollout
from instruct_goose.training.trainer import RLHFTrainer
from instruct_goose.training.updates import lr_factor

TOKENIZER = word_tokenizer([f"w{i}" for i in range(9)], 20, pad="<end>", bos="<end>", eos="<end>")
EOS = TOKENIZER.eos_token_id
PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2"]


def tiny(seed=0):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(TOKENIZER), n_embd=8, n_layer=1, n_head=2, n_positions=20,
                                                                 bos_token_id=EOS, eos_token_id=EOS))
    for p in model.parameters(): torch.nn.init.normal_(p, std=.5)
    return model.double()


def trainer(algorithm="ppo", **changes):
    settings = dict(device="cpu", batch_size=4, max_new_tokens=4, minibatches=1) | changes
    return RLHFTrainer(Agent(tiny()), tiny(1), RLHFConfig.preset(algorithm, **settings), tokenizer=TOKENIZER)


def one_token(**columns):
    "A rollout of one response of one token, of which these things are known."
    there, ids = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    number = lambda x: torch.tensor([[x]], dtype=torch.float64)
    known = dict(old_logprobs=-1., ref_logprobs=-1., advantages=0., values=0., returns=0.) | columns
    return Rollout(ids, there, ids, there, **{name: number(x) for name, x in known.items()})


def loss_of_one(t, now=-1., value=0., **columns):
    learnt = t.config.needs == "values"
    number = lambda x: torch.tensor([[x]], dtype=torch.float64)
    batch = one_token(**columns)
    if not learnt: batch.values = batch.returns = None
    return t.loss(Evaluation(number(now), None, number(value) if learnt else None), batch)[0].item()


@pytest.mark.parametrize("value_clip,loss", [(.2, .5 * .8**2 / 2), (.3, .5 * .7**2 / 2), (None, 0.)])
def test_the_value_may_go_value_clip_from_the_value_before_the_update(value_clip, loss):
    "It has gone from 0 to its return, 1: no error at all, but max(0, (V_old + clip − R̂)²)/2 with the clip. c₁ is ½."
    assert loss_of_one(trainer(value_clip=value_clip), value=1., returns=1.) == pytest.approx(loss, abs=1e-12)


def test_the_kl_in_the_loss_has_the_price_of_now():
    t = trainer("grpo", group_size=2, kl_placement="loss", kl_estimator="k2", beta=.1)
    for beta in (.1, .7, 0.):  # k2 of a log-ratio of 2 is 2²/2
        t.beta = beta
        assert loss_of_one(t, ref_logprobs=-3.) == pytest.approx(beta * 2, abs=1e-12)
    t = trainer("grpo", group_size=2, kl_placement="loss", kl_estimator="k2", beta=0.)
    t.beta = .7  # where the run began without
    assert loss_of_one(t, ref_logprobs=-3.) == pytest.approx(1.4, abs=1e-12)


def test_the_greedy_baseline_is_charged_the_price_of_now():
    t = trainer("remax", beta=.1)
    queries, responses = [[0, 5, 7], [0]], [[8, 9], [2, 3]]
    drift = []
    for q, r in zip(queries, responses, strict=True):
        pi, ref = (m.eval()(torch.tensor([q + r])).logits[0].log_softmax(-1) for m in (t.agent.model, t.ref_model))
        drift.append(sum((pi - ref)[len(q) - 1 + i, a].item() for i, a in enumerate(r)))
    r = Rollout(*pad(queries, EOS, side="left"), *pad(responses, EOS))
    assert max(map(abs, drift)) > .1
    for beta in (.1, .7, 0.):
        t.beta = beta
        assert kl_charge(t, r).tolist() == pytest.approx([beta * x for x in drift], abs=1e-9)
        there = t.score(t.rollout(PROMPTS), lambda texts: [5.] * len(texts))
        greedy, row = greedy_responses(t, there)
        assert there.baseline.tolist() == pytest.approx([5. - x for x in kl_charge(t, greedy)[row].tolist()], abs=1e-6)


def test_metrics_have_the_price_that_they_were_made_with_and_the_next_has_the_new_one():
    t = trainer(beta=.5, kl_target=1e-6)  # the reference is far away: β rises by 10 % of the largest error, 20 %
    seen = [(t.beta, t.step(PROMPTS, lambda texts: [0.] * len(texts))) for _ in range(3)]
    assert [before for before, _ in seen] == [m["beta"] for _, m in seen] == pytest.approx([.5, .5 * 1.02, .5 * 1.02**2])


@pytest.mark.parametrize("kl,ends", [(2.1, True), (2., False), (.5, False), (None, False)])
def test_the_limit_of_a_run_is_of_the_exact_kl_to_the_reference(kl, ends):
    others = dict.fromkeys(("kl_estimate", "kl_to_old", "kl_to_old_exact", "held_out_kl", "beta"), 0. if ends else 9.)
    said = StopAtKL(2.).on_iteration(None, None, {"kl_to_reference": kl} | others)
    assert said == ("kl_to_reference is 2.1, above kl_stop, 2" if ends else None)


@pytest.mark.parametrize("decay", [0., .3])
def test_weights_decay_apart_from_their_gradients(decay):
    "AdamW (Loshchilov and Hutter 2019): where the gradient is 0, θ ← θ·(1 − η·λ), for the values too."
    t = trainer(lr=.1, value_lr=.2, weight_decay=decay)
    torch.nn.init.constant_(t.agent.value_head.weight, 2.)
    for p in t.agent.parameters(): p.grad = torch.zeros_like(p)
    before = [[p.detach().clone() for p in kind()] for kind in (t.agent.policy_parameters, t.agent.value_parameters)]
    t.optimizer.step()
    for kind, old, lr in zip((t.agent.policy_parameters, t.agent.value_parameters), before, (.1, .2), strict=True):
        for p, x in zip(kind(), old, strict=True): torch.testing.assert_close(p.detach(), x * (1 - lr * decay))


def test_a_reference_in_another_precision_leaves_the_scores_alone():
    "With β = 0 it does not matter at all: .1 is not rounded to float32 on the way to a loss in float64."
    batch = (*pad([[0, 5, 7], [0]], EOS, side="left"), *pad([[8, 9], [2, 3]], EOS), torch.tensor([.1, .7], dtype=torch.float64))
    baseline = torch.tensor([.3, -.9], dtype=torch.float64)
    losses = []
    for ref in (tiny(1), tiny(1).float()):
        c = RLHFConfig.preset("remax", beta=0., device="cpu")
        losses.append(RLHFTrainer(Agent(tiny()), ref, c).compute_loss(*batch, baseline).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12) and losses[0] != 0


@pytest.mark.parametrize("schedule,factors", [("constant", [1, 1, 1, 1, 1, 1]), ("linear", [1, .75, .5, .25, 0, 0]),
                                              ("cosine", [1, .5 + 8**-.5, .5, .5 - 8**-.5, 0, 0])])
def test_a_learning_rate_of_four_steps(schedule, factors):
    c = RLHFConfig(steps=4, lr_schedule=schedule)
    assert [lr_factor(c, i) for i in range(6)] == pytest.approx(factors, abs=1e-12)
