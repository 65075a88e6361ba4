"""A reference that moves, policies put aside, and the KL limit of a run.

Oracles: TRL's formula, a run whose reference is replaced by hand, and a run that was never stopped.
"""

import copy
from dataclasses import replace

import pytest
import small_trainer
import torch
from small_trainer import (
    HELD_OUT,
    experience,
    kl_by_hand,
    no_clock,
    reward,
    rows,
    same,
    tiny,
)
from states import through_files
from torch import nn

from instruct_goose.config import RLHFConfig
from instruct_goose.models.agent import Agent
from instruct_goose.rollouts.rewards import RewardError
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.policies import KLLimit, PolicySnapshot, update_reference
from instruct_goose.training.trainer import RLHFTrainer

PROMPTS = ["w0 w3", "w5", "w1 w1 w2", "w8 w7"]


def trainer(**changes):
    return small_trainer.trainer(**dict(max_new_tokens=4, lr=1e-2, steps=6) | changes)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# ── the reference ──


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_part_of_the_way_as_trl_goes_it(dtype):
    "trl 1.16, SyncRefModelCallback: target.mul_(1 − α).add_(policy, alpha=α), in float64."
    policy, reference = tiny(seed=1, dtype=dtype), tiny(seed=2, dtype=dtype)
    expected = [
        (1 - 0.6) * r.double() + 0.6 * p.double()
        for r, p in zip(weights(reference), weights(policy), strict=True)
    ]
    update_reference(reference, policy, 0.6)
    for got, e in zip(weights(reference), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got, e.to(dtype), rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-7
        )
    update_reference(reference, policy)
    assert same(weights(reference), weights(policy))


class ByHand(Callback):
    "The reference is replaced after iterations 2 and 4, by hand."

    def on_iteration(self, trainer, experience, metrics):
        if trainer.iteration % 2 == 0:
            trainer.ref_model.load_state_dict(copy.deepcopy(trainer.agent.model.state_dict()))


def test_a_run_is_that_with_the_reference_replaced_by_hand():
    one = trainer(ref_every=2)
    two = trainer(callbacks=[ByHand()])
    first, second = (t.train(PROMPTS, reward, progress=False) for t in (one, two))
    assert [m.pop("reference_moved") for m in first] == [0, 1] * 3
    assert no_clock(first) == no_clock(second)
    assert same(weights(one.agent), weights(two.agent))


def test_right_after_a_move_the_kl_is_zero():
    t = trainer(ref_every=2)
    kl = [m["kl_to_reference"] for m in t.train(PROMPTS, reward, progress=False)]
    assert max(kl[0], kl[2], kl[4]) < 1e-6 < min(kl[1], kl[3], kl[5])
    assert not any(p.requires_grad for p in t.ref_model.parameters())
    assert not t.ref_model.training


def test_each_kl_of_an_iteration_is_to_the_reference_before_its_move():
    "Until a reference has moved, a run is that with a reference that stays."
    settings = dict(eval_every=1, max_kl_to_reference=1e3)
    moving, staying = trainer(ref_every=2, **settings), trainer(**settings)
    one, other = (
        t.train(
            PROMPTS,
            reward,
            held_out=HELD_OUT,
            callback=lambda m: m["iteration"] == 1,  # in the iteration that moves it
            progress=False,
        )
        for t in (moving, staying)
    )
    assert [m.pop("reference_moved") for m in one] == [0, 1]
    assert no_clock(one) == no_clock(other)
    assert min(one[-1]["held_out_kl"], one[-1]["final_kl_to_reference"]) > 1e-4
    assert same(weights(moving.ref_model), weights(moving.agent.model))  # it has moved


@pytest.mark.parametrize("ends_as_planned", [True, False])
def test_the_kl_limit_holds_in_an_iteration_that_moves_the_reference(ends_as_planned):
    t = trainer(ref_every=1, max_kl_to_reference=1e-5)
    before = weights(t.agent.model)
    steps, callback = (1, None) if ends_as_planned else (3, lambda metrics: True)
    [metrics] = t.train(PROMPTS, reward, steps=steps, callback=callback, progress=False)
    assert metrics["final_kl_to_reference"] > 1e-5
    assert "the policy after 0 iterations is put back" in t.stop_reason
    assert same(weights(t.agent.model), before) and same(weights(t.ref_model), before)


def test_a_resumed_run_has_the_reference_that_it_had(tmp_path):
    settings = dict(ref_every=3, ref_mixup=0.6, kl_target=1.0, entropy_target=2.1, ent_coef=0.01)
    whole = trainer(**settings)
    expected = whole.train(PROMPTS, reward, progress=False)
    first = trainer(**settings)
    first.train(PROMPTS, reward, steps=3, progress=False)
    state = first.state_dict()
    assert state["parts"]["reference"]
    assert state["identity"]["reference"] is None  # it is no constant of the run
    again = trainer(**settings)
    again.load_state_dict(through_files(tmp_path, state))
    assert no_clock(again.train(PROMPTS, reward, progress=False)) == no_clock(expected[3:])
    assert same(weights(again.agent), weights(whole.agent))
    assert same(weights(again.ref_model), weights(whole.ref_model))


def test_the_state_of_a_moving_reference_is_refused_where_it_stays():
    moving, still = trainer(ref_every=2), trainer()
    with pytest.raises(ValueError, match="ref_every"):
        still.load_state_dict(moving.state_dict())


def test_a_reference_that_lacks_a_weight_is_refused():
    t = trainer(ref_every=2)
    state = t.state_dict()
    reference = state["parts"]["reference"]
    reference.pop(next(iter(reference)))
    with pytest.raises(ValueError, match="another reference's weights"):
        t.load_state_dict(state)


def test_weights_for_a_reference_that_stays_are_refused():
    t = trainer()
    state = t.state_dict()
    state["parts"]["reference"]["weight"] = torch.ones(2)
    with pytest.raises(ValueError, match="another reference's weights"):
        t.load_state_dict(state)


def test_who_cannot_be_followed_is_refused_when_the_trainer_is_made():
    with pytest.raises(ValueError, match="cannot follow the policy: model.embed_tokens.weight is"):
        trainer(ref_model=tiny("llama"), ref_every=2)
    trainer(ref_model=tiny("llama"))  # one that stays may be of any shape


def with_trained_lora():
    "A model with adapters that have learnt something."
    pytest.importorskip("peft")
    from instruct_goose.models.adapters import with_lora

    model = with_lora(tiny(dtype=torch.float32), 2)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def test_the_reference_of_fresh_adapters_is_the_bare_model_and_cannot_follow():
    pytest.importorskip("peft")
    from instruct_goose.models.adapters import with_lora

    with pytest.raises(ValueError, match="cannot follow the policy: "):
        trainer(model=with_lora(tiny(dtype=torch.float32), 2), ref_every=2)


def test_of_trained_adapters_a_copy_follows_and_alone_is_saved():
    model = with_trained_lora()
    t = trainer(model=model, ref_every=1)
    saved = t.moving_reference.state_dict()
    assert saved
    assert all("lora" in name for name in saved)
    t.train(PROMPTS, reward, steps=2, progress=False)
    assert same(weights(t.ref_model), weights(t.agent.model))
    again = trainer(model=copy.deepcopy(model), ref_every=1)
    again.load_state_dict(t.state_dict())
    assert same(weights(again.ref_model), weights(t.ref_model))


# ── policies put aside ──


def test_a_snapshot_is_a_copy_and_restores_the_policy():
    agent = Agent(tiny())
    snapshot = PolicySnapshot(agent)
    assert not snapshot.load_into_policy()  # there is none
    start = weights(agent)
    snapshot.keep(kept_for=1.5, iteration=3)
    with torch.no_grad():
        for p in agent.model.parameters():
            p.add_(1.0)
    assert not same(weights(agent), start)
    assert snapshot.load_into_policy()
    assert same(weights(agent), start)


def test_the_state_of_a_snapshot_survives_files(tmp_path):
    agent = Agent(tiny())
    kept = PolicySnapshot(agent)
    kept.keep(kept_for=1.5, iteration=3)
    other = PolicySnapshot(Agent(tiny(seed=1)))
    state = through_files(tmp_path, kept.state_dict())
    other.check_state_dict(state)
    other.load_state_dict(state)
    assert other.load_into_policy()
    assert (other.kept_for, other.iteration) == (1.5, 3)
    assert same(weights(other.agent.model), weights(agent.model))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"weights": {"x": torch.ones(1)}},
            "another model's weights, in a policy that was put aside",
        ),
        ({"kept_for": "high"}, "kept_for is 'high'"),
        ({"iteration": -1}, "iteration is -1"),
    ],
)
def test_a_state_that_is_no_snapshot_of_this_policy_is_refused(change, says):
    snapshot = PolicySnapshot(Agent(tiny()))
    snapshot.keep(kept_for=1.5, iteration=3)
    with pytest.raises(ValueError, match=says):
        snapshot.check_state_dict(snapshot.state_dict() | change)


class Scripted(RLHFTrainer):
    "Held-out prompts get the next of a script's rewards."

    script = ()

    def ask_rewards(self, rollout, reward_fn, kind="text"):
        if kind != "held-out text":
            return super().ask_rewards(rollout, reward_fn, kind)
        score, *self.script = self.script
        return replace(rollout, scores=torch.full((len(rollout),), score))


def scripted_run(rewards):
    "A trainer that got these held-out rewards, and its policy after each iteration."
    t = small_trainer.trainer(Scripted, eval_every=1, keep_best=True, batch_size=16)
    t.script = rewards
    policies = []
    t.train(
        small_trainer.PROMPTS,
        reward,
        steps=len(rewards),
        progress=False,
        held_out=HELD_OUT[:8],
        callback=lambda m: policies.append(copy.deepcopy(t.agent.model.state_dict())),
    )
    return t, policies


def equal_weights(one, other):
    return one.keys() == other.keys() and all(one[name].equal(x) for name, x in other.items())


def test_the_policy_with_the_highest_held_out_reward_is_kept():
    t, policies = scripted_run([1.0, 5.0, 3.0, 5.0])  # the first of equals stays
    assert t.best_policy.kept_for == 5.0
    assert all(x.device.type == "cpu" for x in t.best_weights.values())
    kept = [equal_weights(t.best_weights, policy) for policy in policies]
    assert kept == [False, True, False, False]


def test_the_best_policy_loads_into_a_plain_model_and_into_the_trainer():
    t, _ = scripted_run([1.0, 5.0, 3.0])
    fresh = tiny(seed=3)
    fresh.load_state_dict(t.best_weights)
    value_head = t.agent.value_head.weight.clone()
    t.load_best()
    ids = torch.tensor([[0, 3, 4]])
    assert t.agent.model.eval()(ids).logits.equal(fresh.eval()(ids).logits)
    assert t.agent.value_head.weight.equal(value_head)


def test_the_kept_policy_does_not_move_with_the_trained_one():
    t, _ = scripted_run([1.0, 5.0, 3.0])
    t.load_best()
    kept = copy.deepcopy(t.best_weights)
    t.step(small_trainer.PROMPTS, reward)
    assert equal_weights(t.best_weights, kept)
    assert not equal_weights(t.agent.model.state_dict(), kept)


def test_keep_best_needs_evaluations(unchecked):
    says = "eval_every is None: it must be a number of iterations, at most steps, with keep_best"
    with unchecked(), pytest.raises(ValueError, match=says):
        RLHFConfig(keep_best=True)


def test_without_a_kept_policy_there_is_no_best_one():
    with pytest.raises(ValueError, match="no policy has been kept: set keep_best"):
        trainer().load_best()


# ── the KL limit ──


def with_kl(*kl):
    "An experience of responses of one token with these KLs."
    column = torch.tensor(kl, dtype=torch.float64)[:, None]
    ones = torch.ones(len(kl), 1)
    return experience(ones.long(), ones.bool(), ones.long(), ones.bool(), kl=column)


def test_the_limit_is_on_the_mean_kl_of_a_response():
    stop = KLLimit(Agent(tiny()), limit=2.0)
    stop.keep_if_within_limit(with_kl(1.0, 4.0), iteration=7)
    assert stop.weights is None  # 2.5 nats
    stop.keep_if_within_limit(with_kl(1.0, 3.0), iteration=8)
    assert (stop.kept_for, stop.iteration) == (2.0, 8)


@pytest.mark.parametrize("limit, kl", [(None, 9.0), (2.0, 2.0), (2.0, None)])
def test_a_run_goes_on_within_the_limit(limit, kl):
    assert KLLimit(Agent(tiny()), limit).reason_to_stop({"kl_to_reference": kl}) is None


def test_without_a_policy_within_the_limit_the_last_one_stays():
    agent = Agent(tiny())
    start = weights(agent)
    assert (
        KLLimit(agent, 2.0).reason_to_stop({"kl_to_reference": 2.5})
        == "kl_to_reference is 2.5, above max_kl_to_reference, 2"
    )
    assert same(weights(agent), start)


def limited_run():
    "The KL of each iteration of a free run, and of it a run that stops above its third KL."
    free = small_trainer.trainer()
    history = free.train(small_trainer.PROMPTS, reward, steps=6, progress=False)
    assert free.stop_reason is None
    limit = history[2]["kl_to_reference"]
    limited = small_trainer.trainer(max_kl_to_reference=limit)
    policies = []
    stopped = limited.train(
        small_trainer.PROMPTS,
        reward,
        steps=6,
        callback=lambda m: policies.append(copy.deepcopy(limited.agent.model.state_dict())),
        progress=False,
    )
    above = [i for i, m in enumerate(history) if m["kl_to_reference"] > limit]
    return history, limited, stopped, policies, above[0]


def test_a_run_stops_after_the_iteration_whose_kl_is_too_large():
    history, limited, stopped, policies, first = limited_run()
    assert 2 < first < 5
    assert no_clock(stopped) == no_clock(history[: first + 1])
    assert len(policies) == limited.iteration == first + 1
    kl = history[first]["kl_to_reference"]
    assert limited.stop_reason.startswith(
        f"iteration {first}: kl_to_reference is {kl:.3g}, above max_kl_to_reference"
    )


def test_the_policy_that_wrote_the_last_rollout_within_the_limit_is_put_back():
    _, limited, _, policies, first = limited_run()
    assert equal_weights(limited.agent.model.state_dict(), policies[first - 2])
    assert not equal_weights(policies[first - 2], policies[first - 1])
    assert f"the policy after {first - 1} iterations is put back" in limited.stop_reason


def test_the_policy_that_the_last_iteration_leaves_is_within_the_limit_too():
    "The run ends by itself just before it samples from a policy above the limit."
    history, _, _, policies, first = limited_run()
    limit = history[2]["kl_to_reference"]
    t = small_trainer.trainer(max_kl_to_reference=limit)
    log = t.train(small_trainer.PROMPTS, reward, steps=first, progress=False)
    final_kl = log[-1].pop("final_kl_to_reference")
    assert no_clock(log) == no_clock(history[:first])  # all are within the limit
    assert final_kl > limit
    assert t.stop_reason == (
        f"iteration {first - 1}: final_kl_to_reference is {final_kl:.3g}, above "
        f"max_kl_to_reference, {limit:g}; the policy after {first - 1} iterations is put back"
    )
    assert equal_weights(t.agent.model.state_dict(), policies[first - 2])


def test_the_policy_of_a_run_that_a_callback_ends_is_within_the_limit_too():
    history, _, _, policies, first = limited_run()
    limit = history[2]["kl_to_reference"]
    t = small_trainer.trainer(max_kl_to_reference=limit, eval_every=1, keep_best=True)
    log = t.train(
        small_trainer.PROMPTS,
        reward,
        steps=6,
        callback=lambda m: (
            m["iteration"] == first - 1
        ),  # just before the limit is seen to be broken
        held_out=HELD_OUT,
        progress=False,
    )
    assert len(log) == first
    assert ["final_kl_to_reference" in metrics for metrics in log] == [False] * (first - 1) + [True]
    assert log[-1]["final_kl_to_reference"] > limit
    assert equal_weights(t.agent.model.state_dict(), policies[first - 2])
    # the policy put back is that of the evaluation before, and the log has its numbers
    assert log[-1]["held_out_reward"] == log[-2]["held_out_reward"]
    assert log[-1]["held_out_kl"] == log[-2]["held_out_kl"]


def test_a_callback_that_ends_a_run_within_the_limit_leaves_the_policy():
    free = small_trainer.trainer()
    free.train(small_trainer.PROMPTS, reward, steps=2, progress=False)
    t = small_trainer.trainer(max_kl_to_reference=1e9)
    log = t.train(
        small_trainer.PROMPTS, reward, callback=lambda m: m["iteration"] == 1, progress=False
    )
    assert log[-1]["final_kl_to_reference"] < 1e9
    assert t.stop_reason == "iteration 1: the callback asked for it"
    assert equal_weights(t.agent.model.state_dict(), free.agent.model.state_dict())


def test_the_final_kl_is_that_of_the_policy_that_stays():
    class Watched(RLHFTrainer):
        def annotate(self, rollout):
            self.read_last = rollout
            return super().annotate(rollout)

    t = small_trainer.trainer(Watched, max_kl_to_reference=1e9, temperature=1.2)
    log = t.train(small_trainer.PROMPTS, reward, steps=3, progress=False)
    assert ["final_kl_to_reference" in metrics for metrics in log] == [False, False, True]
    kl = kl_by_hand(t.agent.model, t.ref_model, *rows(t.read_last), 1.2)
    assert len(kl) == t.config.batch_size
    assert log[-1]["final_kl_to_reference"] == pytest.approx(sum(kl) / len(kl), rel=1e-6)
    assert t.stop_reason is None


def test_without_a_limit_or_outside_of_train_nothing_is_measured_at_the_end():
    free = small_trainer.trainer()
    assert (
        "final_kl_to_reference"
        not in free.train(small_trainer.PROMPTS, reward, steps=1, progress=False)[-1]
    )
    limited = small_trainer.trainer(max_kl_to_reference=1e9, steps=1)
    assert "final_kl_to_reference" not in limited.step(small_trainer.PROMPTS, reward)


def test_a_policy_that_is_put_back_and_is_the_best_is_named_by_its_own_iterations():
    *_, first = limited_run()
    limit = limited_run()[1].config.max_kl_to_reference
    t = small_trainer.trainer(max_kl_to_reference=limit, eval_every=first + 1, keep_best=True)
    t.train(small_trainer.PROMPTS, reward, steps=6, progress=False, held_out=HELD_OUT)
    assert t.iteration == first + 1  # the only evaluation, of the policy that is put back
    assert t.best_policy.iteration == t.kl_limit.iteration == first - 1
    assert equal_weights(t.best_policy.weights, t.kl_limit.weights)


def test_an_evaluation_by_hand_keeps_no_policy():
    t = small_trainer.trainer(eval_every=2, keep_best=True)
    t.evaluate(HELD_OUT, lambda texts: [100.0] * len(texts))
    assert t.best_weights is None
    t.train(small_trainer.PROMPTS, reward, steps=2, progress=False, held_out=HELD_OUT)
    assert t.best_policy.iteration == 2


def test_the_next_run_forgets_that_the_last_one_was_stopped():
    _, limited, _, _, first = limited_run()
    limited.kl_limit.limit = 1e9
    with pytest.raises(RewardError):
        limited.train(small_trainer.PROMPTS, lambda texts: None, steps=1, progress=False)
    assert limited.stop_reason is None
    again = limited.train(small_trainer.PROMPTS, reward, steps=2, progress=False)
    assert len(again) == 2
    assert limited.stop_reason is None
    assert limited.iteration == first + 3
