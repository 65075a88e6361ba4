"Oracles: TRL's formula, powers of 1 − α, a run whose reference is replaced by hand, and a run that was never stopped."

import copy

import pytest
import torch
from small_trainer import TOKENIZER, no_clock, reward, same, tiny
from torch import nn

from instruct_goose.config import RLHFConfig
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.policies import update_reference
from instruct_goose.training.trainer import RLHFTrainer

PROMPTS = ["w0 w3", "w5", "w1 w1 w2", "w8 w7"]


def trainer(model=None, ref_model=None, **changes):
    settings = (
        dict(device="cpu", batch_size=8, max_new_tokens=4, lr=1e-2, steps=6, seed=1) | changes
    )
    return RLHFTrainer(model or tiny(), ref_model, RLHFConfig(**settings), tokenizer=TOKENIZER)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_part_of_the_way_as_trl_goes_it(dtype):
    "trl 1.16, SyncRefModelCallback: target.mul_(1 − α).add_(policy, alpha=α), here in float64."
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

    def on_iteration(self, trainer, rollout, metrics):
        if trainer.iteration % 2 == 0:
            trainer.ref_model.load_state_dict(copy.deepcopy(trainer.agent.model.state_dict()))


def test_a_run_is_that_with_the_reference_replaced_by_hand():
    one, two = trainer(ref_every=2), trainer()
    two.callbacks = [ByHand()]
    first, second = (t.train(PROMPTS, reward, progress=False) for t in (one, two))
    moved = [m.pop("reference_moved") for m in first]
    assert (
        moved == [0, 1] * 3
        and no_clock(first) == no_clock(second)
        and same(weights(one.agent), weights(two.agent))
    )
    kl = [m["kl_to_reference"] for m in first]
    assert max(kl[0], kl[2], kl[4]) < 1e-6 < min(kl[1], kl[3], kl[5])
    assert (
        all(not p.requires_grad for p in one.ref_model.parameters()) and not one.ref_model.training
    )


def test_a_resumed_run_has_the_reference_that_it_had():
    settings = dict(ref_every=3, ref_mixup=0.6, kl_target=1.0, entropy_target=2.1, ent_coef=0.01)
    whole = trainer(**settings)
    expected = whole.train(PROMPTS, reward, progress=False)
    first, again = trainer(**settings), trainer(**settings)
    first.train(PROMPTS, reward, steps=3, progress=False)
    tensors, record = first.state()
    assert any(name.startswith("reference/") for name in tensors) and record["reference"] is None
    again.load_state({k: x.clone() for k, x in tensors.items()}, record)
    assert no_clock(again.train(PROMPTS, reward, progress=False)) == no_clock(expected[3:])
    assert same(weights(again.agent), weights(whole.agent)) and same(
        weights(again.ref_model), weights(whole.ref_model)
    )


def test_states_of_the_other_kind_are_refused():
    moving, still = trainer(ref_every=2), trainer()
    for t in (moving, still):
        t.train(PROMPTS, reward, steps=1, progress=False)
    with pytest.raises(ValueError, match="ref_every"):
        still.load_state(*moving.state())
    tensors, record = moving.state()
    name = next(k for k in tensors if k.startswith("reference/"))
    with pytest.raises(ValueError, match="another reference's weights"):
        moving.load_state({k: x for k, x in tensors.items() if k != name}, record)
    tensors, record = still.state()
    with pytest.raises(ValueError, match="another reference's weights"):
        still.load_state(tensors | {name: torch.ones(2)}, record)


def test_who_cannot_be_followed_is_refused_when_the_trainer_is_made():
    with pytest.raises(ValueError, match="cannot follow the policy: model.embed_tokens.weight is"):
        trainer(ref_model=tiny("llama"), ref_every=2)
    trainer(ref_model=tiny("llama"))  # one that stays may be of any shape


def test_adapters():
    "Fresh ones: the reference is the bare model, and is refused by name. Later ones: a copy of the adapters follows, and alone is saved."
    pytest.importorskip("peft")
    from instruct_goose.models.adapters import with_lora

    fresh = with_lora(tiny(dtype=torch.float32), 2)
    with pytest.raises(ValueError, match="cannot follow the policy: "):
        trainer(fresh, ref_every=2)
    for name, p in fresh.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    t = trainer(fresh, ref_every=1)
    own, _ = t.reference.state()
    assert own and all("lora" in name for name in own)
    t.train(PROMPTS, reward, steps=2, progress=False)
    assert same(weights(t.ref_model), weights(t.agent.model))
    again = trainer(copy.deepcopy(fresh), ref_every=1)
    again.load_state(*t.state())
    assert same(weights(again.ref_model), weights(t.ref_model))
