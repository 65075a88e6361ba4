"""What must not change what the trainer computes: every number at a real token, every metric, the gradient, the stepped weights.
Models are float64. Bitwise where the same operations meet the same numbers in the same shapes (poison); elsewhere another shape
may take another kernel, which adds in another order, and a float64 sum of a few dozen terms near 1 is off by some 1e-15."""

import copy
from functools import cache

import pytest
import torch
from deep import first
from invariant_rows import CONFIGS, SETTINGS, agree, models, responses, trainer
from small_trainer import EOS, V

from instruct_goose.config import RLHFConfig
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.tasks.invariances import difference, outcome, poisoned, relaid
from instruct_goose.training.trainer import RLHFTrainer

each_model = pytest.mark.parametrize("name", CONFIGS)

each_setting = pytest.mark.parametrize("setting", SETTINGS)
ONE_LEVEL = [
    (s, n) for s in SETTINGS for n in CONFIGS if n == "gpt2" or s in ("ppo", "dapo", "gspo")
]


@cache
def plain(setting, name, **changes):
    return outcome(trainer(setting, name, **changes), responses(setting))


def test_the_plain_outcome_is_worth_comparing():
    "Ratios leave 1, clips act, weights move, and padding is there to be poisoned."
    out = plain("ppo", "gpt2")
    assert (
        out["metric clip_fraction"] > 0
        and out["metric kl_to_reference"] > 0.1
        and out["metric explained_variance"].isfinite()
    )
    before = dict(models("gpt2")[0].named_parameters())
    assert all(
        not torch.equal(x, before[n.split()[1]])
        for n, x in out.items()
        if n.startswith("weight") and "wpe" not in n
    )
    assert {n.split()[1] for n in out if n.startswith("token")} >= set(
        "old_logprobs ref_logprobs entropy kl values rewards advantages returns scores".split()
    )
    r = responses("ppo")
    assert (~r.mask).sum() == 11 and (~r.query_mask).sum() == 8


@pytest.mark.parametrize("fill,token", first(1, [(float("nan"), V - 1), (1e6, 1)]))
@pytest.mark.parametrize("setting,name", ONE_LEVEL)
def test_poisoned_padding_changes_no_bit(setting, name, fill, token):
    seen = []

    def spoil(r):
        seen.append(poisoned(r, fill, token))
        return seen[-1]

    off = difference(
        plain(setting, name), outcome(trainer(setting, name), responses(setting), spoil)
    )
    assert off == (0.0, "nowhere")
    last = seen[
        -1
    ]  # the poison was there: in the ids, and in every float that the update was given
    assert (last.query_ids[~last.query_mask] == token).all() and (
        last.response_ids[~last.mask] == token
    ).all()
    floats = [
        x
        for k, x in vars(last).items()
        if torch.is_tensor(x) and x.is_floating_point() and x.ndim == 2
    ]
    assert len(floats) >= 5 and all(
        (x[~last.mask].nan_to_num(2.0) == torch.tensor(fill).double().nan_to_num(2.0)).all()
        for x in floats
    )


@each_model
def test_poison_in_the_rows_of_a_response_of_ones_own(name):
    "compute_loss: rows from anywhere, ids that the model does not know in the padding, padding of any width on any side."
    t = trainer("ppo", name)
    r = responses("ppo")
    loss = t.compute_loss(r.query_ids, r.query_mask, r.response_ids, r.mask, r.scores)
    for bad in (-100, 10**6):
        p = poisoned(r, 0.0, bad)
        assert torch.equal(
            t.compute_loss(p.query_ids, p.query_mask, p.response_ids, p.mask, p.scores), loss
        )


@pytest.mark.parametrize(
    "query_side,response_side,extra",
    first(1, [("scattered", "scattered", 2), ("right", "right", 0), ("left", "left", 3)]),
)
@pytest.mark.parametrize("setting,name", ONE_LEVEL)
def test_the_side_of_the_padding_changes_nothing(setting, name, query_side, response_side, extra):
    moved = relaid(responses(setting), query_side, response_side, extra)
    if extra:
        assert moved.mask.shape[1] == responses(setting).mask.shape[1] + extra
    agree(plain(setting, name), outcome(trainer(setting, name), moved), name)


@each_model
def test_without_padding_each_row_alone_says_the_same(name):
    "The oracle is the model's own forward of one unpadded text: no mask, no position ids, no batch."
    agent = copy.deepcopy(models(name)[0]).eval()
    r = responses("ppo")
    out = plain("ppo", name)
    logprobs, values = [], []
    for i in range(len(r)):
        q, a = r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]
        ids = torch.cat([q, a])[None]
        states = slice(len(q) - 1, len(q) + len(a) - 1)
        logprobs.append(
            agent.model(ids).logits[0, states].log_softmax(-1).gather(-1, a[:, None])[:, 0]
        )
        values.append(
            agent.value_head(agent.model.base_model(ids).last_hidden_state[0, states])[:, 0]
        )
    for name_of, x in (("old_logprobs", logprobs), ("values", values)):
        torch.testing.assert_close(
            out[f"token {name_of}"],
            torch.cat(x).detach(),
            atol=1e-12 if name == "gpt2" else 1e-6,
            rtol=0,
        )


def test_an_absolute_position_model_would_notice():
    "The check can fail: the same text with its positions counted from the edge of the batch has other log-probabilities."
    agent = copy.deepcopy(models("gpt2")[0]).eval()
    ids, mask = pad([[5, 7, 8]], EOS, side="left")
    wide = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], 1)
    naive = agent.model(
        wide, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]), position_ids=torch.arange(5)[None]
    ).logits[0, 2:]
    assert (naive - agent.model(ids).logits[0]).abs().max() > 0.1


@pytest.mark.parametrize("micro", first(1, [2, 1, 5]))
@pytest.mark.parametrize("setting,name", ONE_LEVEL)
def test_micro_batches_change_nothing(setting, name, micro):
    "Minibatches of three rows, cut in three and in two unequal pieces, a group apart; one minibatch of six, cut into five and one."
    changes = dict(minibatches=1) if micro == 5 else {}
    agree(
        plain(setting, name, **changes),
        outcome(trainer(setting, name, micro_batch_size=micro, **changes), responses(setting)),
        name,
    )


ORDERS = {"groups": [4, 5, 0, 1, 2, 3], "within groups, and groups": [3, 2, 5, 4, 0, 1]}


@pytest.mark.parametrize("order", first(1, reversed(ORDERS.values())))
@pytest.mark.parametrize("setting,name", ONE_LEVEL)
def test_the_order_of_groups_and_within_them_changes_nothing(setting, name, order):
    back = torch.tensor(order).argsort()
    other = outcome(trainer(setting, name, minibatches=1), responses(setting)[order], rows=back)
    agree(plain(setting, name, minibatches=1), other, name)


@each_model
def test_sampling_and_a_whole_step_do_not_see_the_padding_of_the_queries(name):
    tokenizer = word_tokenizer(
        [f"w{i}" for i in range(V - 2)], 16, pad="<end>", bos="<end>", eos="<end>"
    )
    r = responses("ppo")

    def step(query_ids, query_mask):
        t = RLHFTrainer(
            copy.deepcopy(models(name)[0]),
            models(name)[1],
            tokenizer=tokenizer,
            config=RLHFConfig(device="cpu", batch_size=6, max_new_tokens=5, lr=0.02),
        )
        metrics = t.step(
            dict(query_ids=query_ids, query_mask=query_mask),
            lambda texts: [len(x) / 10 for x in texts],
        )
        metrics = {
            k: float("nan") if x is None else x
            for k, x in metrics.items()
            if "second" not in k and k not in ("weights_moved", "weight_change_rms")
        }
        return {f"metric {k}": torch.tensor(x, dtype=torch.float64) for k, x in metrics.items()} | {
            f"weight {n}": p.detach() for n, p in t.agent.named_parameters()
        }

    first = step(r.query_ids, r.query_mask)
    for other in (
        poisoned(r, 0.0, 9),
        relaid(r, "right", "right", 2),
        relaid(r, "scattered", "right", 1),
    ):
        agree(first, step(other.query_ids, other.query_mask), name)
