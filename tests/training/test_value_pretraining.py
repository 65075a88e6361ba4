"""The critic alone learns the returns of the fixed policy: against values by enumeration, and with everything else unmoved."""

import copy

import pytest
import torch

from instruct_goose import Agent, RLHFConfig, RLHFTrainer
from instruct_goose.core import processes
from instruct_goose.rollouts.multi_turn import TurnSampler
from instruct_goose.tasks.exact_world import PROMPTS, enumerate_logprobs, make_world, tiny_policy
from instruct_goose.tasks.probes import tiny_world
from instruct_goose.training.value_pretraining import (
    critic_parameters,
    pretrain_values,
    value_step,
)

WORLD = make_world()
# another reward than the page's: by the number of tokens, and the prompt
PRICES = {PROMPTS[0]: 1.0, PROMPTS[1]: -1.0, PROMPTS[2]: 0.5}


def price(prompts, completion_ids):
    return [PRICES[p] * len(ids) for p, ids in zip(prompts, completion_ids)]


def make_trainer(value_model="copy", **settings):
    config = RLHFConfig(
        **dict(batch_size=96, minibatches=4, epochs=2, max_new_tokens=3, beta=0.0, gamma=1.0)
        | settings,
        device="cpu",
    )
    agent = Agent(tiny_policy("absolute", seed=3), value_model=value_model)
    return RLHFTrainer(agent, config=config, tokenizer=WORLD.tokenizer)


def exact_values(policy):
    "V of the first state of each prompt: Σ over all 40 responses of π(r|q)·R(q, r)."
    with torch.no_grad():
        chances = enumerate_logprobs(policy, WORLD).sum(-1).exp()
    lengths = WORLD.mask.sum(1).to(chances)
    return torch.tensor([PRICES[p] for p in PROMPTS]) * (chances * lengths).sum(-1)


def first_values(trainer):
    "What the critic says of the first state of each prompt."
    queries = WORLD.queries(copies=1)
    one = WORLD.response_ids[:1].repeat(len(PROMPTS), 1), WORLD.mask[:1].repeat(len(PROMPTS), 1)
    with torch.no_grad():
        return trainer.agent.values(*queries, *one)[:, 0]


def state_of(module):
    return copy.deepcopy(module.state_dict())


def test_the_critic_finds_the_exact_values_and_the_policy_stays():
    trainer = make_trainer()
    policy = state_of(trainer.agent.model)
    optimizer = copy.deepcopy(trainer.optimizer.state_dict())
    exact = exact_values(trainer.agent.model)
    before = (first_values(trainer) - exact).abs().max()
    log = pretrain_values(trainer, list(PROMPTS), price, iterations=15, lr=3e-3)
    after = (first_values(trainer) - exact).abs().max()
    assert after < 0.35 * before, (before, after)
    assert len(log) == 15 and log[-1]["value_loss"] < log[0]["value_loss"] / 2
    assert log[-1]["explained_variance"] > 0.5
    assert all(torch.equal(x, trainer.agent.model.state_dict()[k]) for k, x in policy.items())
    assert trainer.optimizer.state_dict() == optimizer
    assert trainer.iteration == 0 and trainer.prompt_order.seen == 0
    assert all(p.grad is None for p in trainer.agent.parameters())


def test_on_the_policys_transformer_only_the_head_learns():
    trainer = make_trainer(value_model=None)
    policy = state_of(trainer.agent.model)
    assert len(critic_parameters(trainer.agent)) == 2
    pretrain_values(trainer, list(PROMPTS), price, iterations=3, lr=3e-2)
    assert all(torch.equal(x, trainer.agent.model.state_dict()[k]) for k, x in policy.items())
    assert trainer.agent.value_head.weight.abs().sum() > 0


def test_the_target_is_the_whole_return_whatever_lambda_is():
    "With γ = .5 and one reward at the end, a token k before it is worth .5ᵏ."
    trainer = make_trainer(gamma=0.5, lam=0.0, epochs=1, minibatches=1, whiten_advantages=False)
    seen = []

    def reward(prompts, completion_ids):
        seen.append([len(ids) for ids in completion_ids])
        return [4.0] * len(prompts)

    log = pretrain_values(trainer, list(PROMPTS), reward, iterations=1)
    squares = [(4.0 * 0.5**k) ** 2 / 2 for n in seen[0] for k in range(n)]  # the head begins at 0
    assert log[0]["value_loss"] == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def test_ppo_goes_on_from_the_critic():
    trainer = make_trainer(steps=2)
    pretrain_values(trainer, list(PROMPTS), price, iterations=15, lr=3e-3)
    untrained = make_trainer(steps=2)
    first = trainer.step(list(PROMPTS) * 32, price)
    other = untrained.step(list(PROMPTS) * 32, price)
    assert first["explained_variance"] > 0.5 > other["explained_variance"]


def test_without_a_critic_there_is_nothing_to_train():
    trainer = RLHFTrainer(
        tiny_policy("absolute"),
        config=RLHFConfig.preset("grpo", device="cpu", max_new_tokens=3),
        tokenizer=WORLD.tokenizer,
    )
    with pytest.raises(ValueError, match="learns no values"):
        pretrain_values(trainer, list(PROMPTS), price, iterations=1)


def test_the_critic_reads_what_an_environment_wrote():
    """One full-batch step of SGD on the head alone, against a slow loop row by row.

    The state of a token holds all before it, an environment's words too; those words have no value
    of their own in the loss.
    """
    model, tokenizer = tiny_world((0.2, 0.2, 0.2, 0.4))
    torch.manual_seed(3)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    config = RLHFConfig(
        batch_size=16, max_new_tokens=8, beta=0.0, gamma=1.0, max_grad_norm=1e9, device="cpu"
    )
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    trainer.use_sampler(lambda agent, tokens: TurnSampler(agent, tokens, lambda text: "b", turns=2))
    experience = trainer.advantages(
        trainer.score(trainer.rollout(["a", "c"] * 8), lambda texts: [len(t) for t in texts])
    )
    assert experience.environment_mask.any()
    experience.returns = torch.randn(experience.mask.shape).masked_fill(~experience.mask, 0)
    head = trainer.agent.value_head
    torch.nn.init.normal_(head.weight)

    errors, states = [], []
    for i in range(len(experience)):
        query = experience.query_ids[i][experience.query_mask[i]]
        real = experience.attention_mask[i]
        ids = torch.cat([query, experience.response_ids[i][real]])[None]
        with torch.no_grad():
            hidden = model.eval().transformer(ids).last_hidden_state[0]
        for t, (own, target) in enumerate(
            zip(experience.mask[i][real], experience.returns[i][real])
        ):
            if own:
                state = hidden[len(query) - 1 + t]
                states.append(state)
                errors.append(state @ head.weight[0].detach() + head.bias.detach() - target)
    gradient = (torch.stack(errors) * torch.stack(states)).mean(0)
    wanted = head.weight[0].detach() - 0.1 * gradient

    parameters = list(head.parameters())
    value_step(trainer.agent, experience, parameters, torch.optim.SGD(parameters, lr=0.1), config)
    torch.testing.assert_close(head.weight[0].detach(), wanted, atol=1e-5, rtol=1e-4)


def test_prompts_without_room_for_a_response_are_dropped_as_in_training():
    model, tokenizer = tiny_world((0.2, 0.2, 0.2, 0.4))
    config = RLHFConfig(
        batch_size=4, max_new_tokens=8, beta=0.0, gamma=1.0, long_rows="drop", device="cpu"
    )
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    asked = []

    def reward(prompts, completion_ids):
        asked.extend(prompts)
        return [1.0] * len(prompts)

    with pytest.warns(UserWarning, match="prompt"):
        pretrain_values(trainer, ["a " * 12, "b"], reward, iterations=2)
    assert set(asked) == {"b"}


def test_the_critic_reads_a_micro_batch_at_once_and_learns_the_same():
    "The rows of each pass with a gradient are counted; weights and log are those of one pass."
    logs, heads, most_rows = [], [], []
    for size in (None, 5):
        trainer = make_trainer(value_model=None, micro_batch_size=size)
        rows = []

        def counted(query_ids, *rest, rows=rows, values=trainer.agent.values):
            if torch.is_grad_enabled():
                rows.append(len(query_ids))
            return values(query_ids, *rest)

        trainer.agent.values = counted
        logs.append(pretrain_values(trainer, list(PROMPTS), price, iterations=2, lr=3e-2))
        heads.append(trainer.agent.value_head.weight.detach().clone())
        most_rows.append(max(rows))
    assert most_rows[1] <= 5 < most_rows[0]
    torch.testing.assert_close(heads[0], heads[1], atol=1e-5, rtol=1e-4)
    for whole, in_pieces in zip(*logs, strict=True):
        assert whole == pytest.approx(in_pieces, rel=1e-4, abs=1e-6)


def test_several_processes_are_refused(monkeypatch):
    trainer = make_trainer()
    for name in processes.TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match="pretrain_values runs in one process"):
        pretrain_values(trainer, list(PROMPTS), price, iterations=1)
