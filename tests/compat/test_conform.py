"""`conform` says which library's loss a function is: losses written by hand here, right ones and wrong ones."""

import json
import math

import pytest
import torch

from instruct_goose.compat.conform import (
    Bounds,
    bind_parameters,
    conform,
    evaluate_loss,
    losses_like,
    recorded_batches,
    region_of,
    surrogate_as_loss,
)
from instruct_goose.compat.library_losses import KL_TERMS, LIBRARY_LOSSES


# --- right losses, in the words of several libraries -------------------------------------------------------------------
def ppo(new_logps, old_logps, adv, mask, eps=0.2):
    change = torch.exp(new_logps - old_logps)
    worst = torch.max(-adv * change, -adv * torch.clip(change, 1 - eps, 1 + eps))
    return (worst * mask).sum() / mask.sum()


def grpo_of_responses(per_token_logps, old_per_token_logps, advantages, completion_mask):
    "TRL's way: one advantage per response."
    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    advantages = advantages.unsqueeze(1)
    per_token = -torch.min(coef_1 * advantages, coef_2 * advantages)
    lengths = completion_mask.sum(-1).clamp(min=1.0)
    return ((per_token * completion_mask).sum(-1) / lengths).mean()


def grpo_with_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta=0.04):
    ratio = (logprobs - old_logprobs).exp()
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = ref_logprobs - logprobs
    per_token = per_token + beta * (gap.exp() - gap - 1)
    return ((per_token * mask).sum(1) / mask.sum(1)).mean(), {"some": "metrics"}


def dr_grpo(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return (loss * mask).sum() / (loss.shape[0] * loss.shape[1])


def cispo(log_prob, old_log_prob, advantages, response_mask):
    weight = torch.exp(log_prob - old_log_prob).clamp(max=3.0).detach()
    return -(weight * advantages * log_prob * response_mask).sum() / response_mask.sum()


def gspo(logprobs, old_logprobs, advantages, mask):
    shift = ((logprobs - old_logprobs) * mask).sum(-1) / mask.sum(-1)
    s = shift.exp()[:, None]
    loss = -torch.min(s * advantages, s.clamp(0.9, 1.1) * advantages)
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def vanilla(old_log_prob, log_prob, advantages, response_mask):
    "verl's way: a dual clip."
    ratio = torch.exp(log_prob - old_log_prob)
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    losses = torch.where(advantages < 0, torch.min(losses, -advantages * 3.0), losses)
    return (losses * response_mask).sum() / (response_mask.sum() + 1e-8)


def reinforce(logprobs, advantages, mask):
    return -(logprobs * advantages * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "libraries", "bounds"),
    [
        (ppo, ("torchtune 0.6.1", "TRL 1.12.0", "TRL 1.16.0 (dapo"), (0.2, 0.2)),
        (grpo_of_responses, ("TRL 1.16.0 (grpo)", "DI-engine", "rlhf-book"), (0.2, 0.2)),
        (dr_grpo, ("TRL 1.16.0 (dr_grpo)", "instruct_goose (dr_grpo)"), (0.2, 0.2)),
        (cispo, ("TRL 1.16.0 (cispo)",), (None, 2.0)),
        (gspo, ("instruct_goose (gspo)", "ratio per response"), (0.1, 0.1)),
        (vanilla, ("verl 0.9.1 (vanilla, token-mean)",), (0.2, 0.28)),
        (reinforce, ("nanochat", "verl 0.9.1 (gpg)"), (None, None)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loss_by_hand_is_known(loss, libraries, bounds):
    found = conform(loss)
    assert found.conforms, str(found)
    for library in libraries:
        assert any(library in title for title in found.same_as), (library, found.same_as)
    for wanted, got in zip(bounds, found.bounds):
        assert wanted is None or math.isclose(wanted, got, abs_tol=1e-5)
    assert loss.__name__ in str(found)


def test_ppo_and_grpo_are_not_taken_for_each_other():
    assert not set(conform(ppo).same_as) & set(conform(grpo_of_responses).same_as)
    assert conform(vanilla).same_as != conform(ppo).same_as


def test_the_kl_is_found_with_its_coefficient():
    found = conform(grpo_with_kl)
    assert (found.kl, found.beta) == ("k3", 0.04)
    assert "TRL 1.16.0 (grpo)" in found.same_as
    assert not any(title.startswith("torchtune") for title in found.same_as)
    twice = conform(grpo_with_kl, settings={"beta": 0.3})
    assert (twice.kl, twice.beta) == ("k3", 0.3)


@pytest.mark.parametrize("name", KL_TERMS)
def test_every_kl_is_told_from_the_others(name):
    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask):
        policy, _ = grpo_with_kl(logprobs, old_logprobs, logprobs.detach(), advantages, mask, 0.0)
        kl = KL_TERMS[name].estimate(logprobs, ref_logprobs, old_logprobs)
        return policy + 0.1 * ((kl * mask).sum(1) / mask.sum(1)).mean()

    found = conform(loss)
    assert (found.kl, found.beta) == (name, 0.1)


# --- wrong losses ------------------------------------------------------------------------------------------------------
def sign_error(logprobs, old_logprobs, advantages, mask):
    return -ppo(logprobs, old_logprobs, advantages, mask)


def max_for_min(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    best = torch.max(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(best * mask).sum() / mask.sum()


def no_upper_clip(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    return -(torch.min(ratio * advantages, ratio.clamp(min=0.8) * advantages) * mask).sum() / (
        mask.sum()
    )


def mean_with_padding(logprobs, old_logprobs, advantages, mask):
    "The mean of each response over all its slots, then over responses, squared lengths in it."
    ratio = (logprobs - old_logprobs).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * mask).sum(1) / mask.sum(1).double().square()).mean()


def no_mask(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def kl_turned(logprobs, old_logprobs, ref_logprobs, advantages, mask):
    gap = ref_logprobs - logprobs
    wrong = gap.exp() + gap - 1
    return ppo(logprobs, old_logprobs, advantages, mask) + 0.1 * (wrong * mask).sum() / mask.sum()


def test_a_turned_sign_is_said():
    found = conform(sign_error)
    assert not found.conforms
    assert found.departure.what.startswith("The sign is turned")
    assert any(title.startswith("torchtune") for title in found.departure.libraries)


def test_max_in_the_place_of_min_departs_where_the_two_differ():
    found = conform(max_for_min, like="torchtune")
    assert set(found.departure.regions) == {
        "ρ < 0.8, Â > 0",
        "ρ < 0.8, Â < 0",
        "ρ > 1.2, Â > 0",
        "ρ > 1.2, Â < 0",
    }
    assert all(bad == every for bad, every in found.departure.regions.values())
    token = found.departure.tokens[0]
    assert not math.isclose(token.yours, token.theirs)


def test_a_missing_upper_bound_is_where_the_ratio_is_high():
    found = conform(no_upper_clip, like="torchtune PPOLoss")
    assert set(found.departure.regions) == {"ρ > 1.2, Â > 0"}
    for token in found.departure.tokens:
        assert token.ratio > 1.2 and token.advantage > 0
        assert token.theirs == 0 and token.yours < 0
    assert "ρ > 1.2, Â > 0" in str(found)


def test_another_average_is_said_by_the_weights_of_rows():
    found = conform(mean_with_padding)
    assert found.departure.what.startswith("The average is none of the table's")
    assert "6, 3, 1, 4" in found.departure.what


def test_a_loss_without_a_mask_counts_padding():
    found = conform(no_mask)
    assert found.same_as == ["CleanRL 1.0.0+72 (PPO)"]
    assert "What stands in the padding changes the loss." in found.notes


def test_a_wrong_kl_is_unknown():
    found = conform(kl_turned)
    assert found.kl == "unknown" and not found.conforms
    assert "no KL of the table" in str(found)


@pytest.mark.parametrize("like", [None, "TRL dr_grpo"])
def test_a_constant_length_is_that_of_trl(like):
    def with_constant(logprobs, old_logprobs, advantages, mask):
        ratio = torch.exp(logprobs - old_logprobs)
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return (loss * mask).sum() / (loss.size(0) * 256)

    found = conform(with_constant, like=like)
    assert found.conforms and "TRL 1.16.0 (dr_grpo)" in found.same_as
    assert any("L is 256" in note for note in found.notes)


def test_a_known_loss_that_is_not_the_one_asked_for_departs():
    found = conform(ppo, like="TRL grpo")
    assert not found.conforms and found.term == "PPO's clip"
    assert "TRL 1.16.0 (grpo)" in found.departure.libraries
    assert found.departure.what.startswith("The average is none")


def test_a_factor_is_said():
    def half(logprobs, old_logprobs, advantages, mask):
        return 0.5 * ppo(logprobs, old_logprobs, advantages, mask)

    assert "0.5 times" in conform(half, like="torchtune").departure.what


def test_a_value_of_its_own_with_a_librarys_gradient_is_said():
    def shifted(logprobs, old_logprobs, advantages, mask):
        shift = (logprobs.detach() * advantages * mask).sum()
        return ppo(logprobs, old_logprobs, advantages, mask) + shift

    assert conform(shifted).departure.what.startswith("The gradient is a library's")


def test_a_clip_that_is_given_is_not_looked_for():
    assert conform(ppo, settings={"clip": 0.1, "clip_high": 0.1}).bounds[:2] == (0.1, 0.1)

    def fixed(logprobs, old_logprobs, advantages, mask):
        return ppo(logprobs, old_logprobs, advantages, mask, 0.3)

    assert math.isclose(conform(fixed).bounds.clip, 0.3, abs_tol=1e-5)
    asked = conform(fixed, like="torchtune", settings={"clip": 0.2, "clip_high": 0.2})
    assert set(asked.departure.regions) == {"ρ < 0.8, Â < 0", "ρ > 1.2, Â > 0"}


def test_a_loss_per_token_is_a_term():
    def per_token(logprobs, old_logprobs, advantages):
        ratio = (logprobs - old_logprobs).exp()
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    for loss in (per_token, surrogate_as_loss("min")):
        found = conform(loss)
        assert found.term == "PPO's clip" and found.average.startswith("none")
        assert any(title.startswith("torchtune") for title in found.same_as)


# --- what cannot be compared -------------------------------------------------------------------------------------------
def test_what_cannot_be_called_is_refused():
    def strange(logprobs, something): ...

    def nothing(logprobs, mask): ...

    def wide(logprobs, mask):
        return (logprobs * mask).sum(1)

    def whole_numbers(logprobs, mask):
        return torch.tensor(1)

    def infinite(logprobs, mask):
        return (logprobs * mask).sum() / 0.0

    def detached(logprobs, mask):
        return (logprobs.detach() * mask).sum()

    def noisy(logprobs, advantages, mask):
        return -(logprobs * advantages * mask * torch.rand_like(logprobs)).sum()

    def broken(logprobs, mask):
        raise KeyError("entropy")

    for loss, words in {
        strange: "needs 'something'",
        nothing: "NoneType",
        wide: r"shape \(2,\)",
        whole_numbers: "floating-point",
        infinite: "inf",
        detached: "no gradient",
        noisy: "not the same twice",
        broken: "KeyError: 'entropy'",
        torch.nn.MSELoss: "is a class",
    }.items():
        with pytest.raises(ValueError, match=words):
            conform(loss)


def test_arguments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="choose among instruct_goose"):
        conform(ppo, like="no such library")
    with pytest.raises(ValueError, match="no setting 'gamma'"):
        conform(ppo, settings={"gamma": 1.0})
    with pytest.raises(ValueError, match="above 0"):
        conform(ppo, settings={"clip": 0.0})
    with pytest.raises(ValueError, match="no parameter 'x'"):
        conform(ppo, names={"x": "mask"})
    with pytest.raises(ValueError, match="nothing that a loss is given"):
        conform(ppo, names={"adv": "returns"})


def test_like_means_the_loss_without_options():
    assert [x.name for x in losses_like("TRL DAPO")] == ["dapo, bnpo"]
    assert [x.name for x in losses_like("TRL dapo with")] == ["dapo with delta"]
    assert {x.average for x in losses_like("verl vanilla")} >= {"token mean", "the sum"}


def test_names_say_what_a_parameter_is():
    def terse(p, q, a, m):
        return ppo(p, q, a, m)

    names = {"p": "logprobs", "q": "old_logprobs", "a": "advantages", "m": "mask"}
    assert conform(terse, names=names).same_as == conform(ppo).same_as
    assert bind_parameters(terse, names, {}) == names


# --- the batches and the report ----------------------------------------------------------------------------------------
def test_the_batches_reach_every_region():
    regions = set()
    for batch in recorded_batches():
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        for r, a, m in zip(ratio.flatten(), batch.advantages.flatten(), batch.mask.flatten()):
            regions.add(region_of(r.item(), a.item(), bool(m), Bounds()))
    assert len(regions) == 9  # four parts of the ratio, two signs, and padding
    again = recorded_batches()
    for one, two in zip(recorded_batches(), again):
        assert torch.equal(one.logprobs, two.logprobs)


def test_the_gradient_is_that_of_finite_differences():
    batch = recorded_batches()[1]

    def loss(given):
        return ppo(given.logprobs, given.old_logprobs, given.advantages, given.mask)

    gradient = evaluate_loss(loss, batch).gradient
    step = 1e-6
    for row, t in [(0, 0), (0, 5), (1, 2), (3, 1)]:
        up = batch.logprobs.clone()
        up[row, t] += step
        down = batch.logprobs.clone()
        down[row, t] -= step
        slope = (loss(batch._replace(logprobs=up)) - loss(batch._replace(logprobs=down))) / 2 / step
        assert math.isclose(slope.item(), gradient[row, t].item(), abs_tol=1e-7)


def test_the_report_is_plain_json():
    found = json.loads(json.dumps(conform(max_for_min, like="torchtune").as_dict()))
    assert found["conforms"] is False and found["loss"] == "max_for_min"
    assert found["departure"]["regions"]["ρ > 1.2, Â > 0"]["departing"] > 0
    assert found["departure"]["tokens"][0]["batch"] == "running example"


def test_every_loss_of_the_table_is_found_again():
    from instruct_goose.compat.conform import candidate_loss

    batch_loss = {(x.term, x.average) for x in LIBRARY_LOSSES}
    for term, average in sorted(batch_loss):
        whole = candidate_loss(term, average, Bounds())

        def loss(logprobs, old_logprobs, advantages, mask, whole=whole):
            batch = recorded_batches()[0]
            return whole(
                batch._replace(
                    **{
                        "logprobs": logprobs,
                        "old_logprobs": old_logprobs,
                        "advantages": advantages,
                        "mask": mask,
                    }
                )
            )

        wanted = [x.title for x in LIBRARY_LOSSES if (x.term, x.average) == (term, average)]
        assert conform(loss).same_as == wanted, (term, average)


def test_a_loss_that_raises_is_reported_with_its_line():
    def loss(logprobs, old_logprobs, advantages, mask):
        return logprobs.sum() + torch.nn.functional.nll_loss(logprobs, mask)

    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"cannot be called: .*test_conform.py, line {line}\)$"):
        conform(loss)
