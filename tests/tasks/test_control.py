"PPO on a pole and a pendulum: where episodes end, what follows them, and the loss, each against something written twice."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal

from instruct_goose.tasks import control
from instruct_goose.tasks.control import ControlConfig, ControlPolicy, Environments, Steps

close = torch.testing.assert_close


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


seeds = st.integers(0, 10**6)
POLE, PENDULUM = "CartPole-v1", "Pendulum-v1"


def policy_for(env_id, seed=0):
    torch.manual_seed(seed)
    return ControlPolicy(4, 2, False) if env_id == POLE else ControlPolicy(3, 1, True)


def textbook(rewards, values, next_values, terminated, truncated, gamma, lam):
    "GAE as loops over flags: one environment, one step at a time, backwards; the last step of a row has no later one"
    out = []
    for r, v, nv, te, tr in zip(
        *(x.tolist() for x in (rewards, values, next_values, terminated, truncated))
    ):
        later = 0.0
        row = []
        for t in reversed(range(len(r))):
            delta = r[t] + (0.0 if te[t] else gamma * nv[t]) - v[t]
            later = delta + (0.0 if te[t] or tr[t] else gamma * lam * later)
            row.insert(0, later)
        out.append(row)
    return f64(out)


def world(seed, n=3, T=25, often=0.15):
    "rewards, values, next values (those of the next step, but where an episode ends), terminated and truncated"
    draw = torch.Generator().manual_seed(seed)
    r, v, other = torch.randn(3, n, T, generator=draw, dtype=torch.float64)
    te, tr = torch.rand(2, n, T, generator=draw) < often
    last = torch.arange(T) == T - 1
    return r, v, torch.where(te | tr | last, other, v.roll(-1, 1)), te, tr


@settings(deadline=None, max_examples=50)
@given(seeds, st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.05, 0.4, 1.0]))
def test_equals_the_textbook(seed, gamma, lam, often):
    r, v, nv, te, tr = world(seed, often=often)
    A, R = control.control_advantages(r, v, nv, te, tr, gamma, lam)
    close(A, textbook(r, v, nv, te, tr, gamma, lam), atol=1e-10, rtol=1e-10)
    close(R, A + v, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_only_the_cuts_look_behind(seed):
    "inside a piece, and behind a fall, the next value may be anything"
    r, v, nv, te, tr = world(seed)
    cut = tr.clone()
    cut[:, -1] = True
    poisoned = torch.where(cut & ~te, nv, math.nan)
    close(
        control.control_advantages(r, v, poisoned, te, tr, 0.9, 0.8),
        control.control_advantages(r, v, nv, te, tr, 0.9, 0.8),
    )


class Scripted:
    "Ends after 3 steps; records what it was told to do."

    def __init__(self):
        self.told = []
        self.t = 0

    def reset(self, seed=None):
        self.t = 0
        return torch.zeros(3).numpy(), {}

    def step(self, action):
        self.told.append(float(action[0]))
        self.t += 1
        return (
            torch.full((3,), float(self.t)).numpy(),
            1.0 * self.t,
            self.t == 3 and len(self.told) < 4,
            self.t == 3,
            {},
        )


def test_actions_are_clipped_for_the_motor_and_kept_as_they_were():
    envs = Environments(PENDULUM, 1)
    envs.envs = [script := Scripted()]

    class Far(ControlPolicy):
        def sample(self, states, generator=None, greedy=False):
            return torch.tensor([[next(torques)]])

    torques = iter([5.0, -0.5, -9.0])
    steps = control.collect(envs, Far(3, 1, True), 3)
    assert script.told == [2.0, -0.5, -2.0]
    assert steps.actions.flatten().tolist() == [5.0, -0.5, -9.0]


def test_an_episode_ends_and_the_next_begins():
    envs = Environments(PENDULUM, 2)
    envs.envs = [Scripted(), Scripted()]
    envs.states = torch.zeros(2, 3)
    steps = control.collect(envs, ControlPolicy(3, 1, True), 4)
    assert steps.next_states[0, :, 0].tolist() == [1, 2, 3, 1]  # 3 was seen, before the restart
    assert steps.states[0, :, 0].tolist() == [0, 1, 2, 0]
    assert (
        steps.terminated[0].tolist() == [False, False, True, False] == steps.truncated[1].tolist()
    )
    assert (
        steps.rewards[1].tolist() == [1, 2, 3, 1]
        and envs.finished == [6.0, 6.0]
        and envs.running == [1.0, 1.0]
    )


def test_policies_against_torch_distributions():
    for env_id in (POLE, PENDULUM):
        policy = policy_for(env_id).double()
        states = torch.randn(50, 4 if env_id == POLE else 3, dtype=torch.float64)
        with torch.no_grad():
            policy.actor[-1].weight.mul_(80)  # far from uniform
            if policy.log_std is not None:
                policy.log_std.fill_(-0.3)
        out = policy.actor(states)
        peer = Categorical(logits=out) if env_id == POLE else Normal(out, math.exp(-0.3))
        actions = peer.sample()
        logprobs, S, values = policy.evaluate(states, actions)

        def flat(x):
            return x if x.ndim == 1 else x.sum(-1)

        close(logprobs, flat(peer.log_prob(actions))), close(S, flat(peer.entropy()))
        assert values.shape == (50,)
        many = policy.sample(
            states[:1].expand(20_000, -1), torch.Generator().manual_seed(0)
        ).double()
        want, spread = (peer.probs[0, 1], 0.5) if env_id == POLE else (out[0, 0], math.exp(-0.3))
        assert abs(many.mean() - want) < 4 * spread / 20_000**0.5
        if env_id == PENDULUM:
            assert abs(many.std() / spread - 1) < 0.03
        best = policy.sample(states, greedy=True)
        close(best, out.argmax(-1) if env_id == POLE else out)


def by_hand(policy, steps, config):
    "one pass over all steps as one minibatch, in torch.distributions and loops: the loss that `update` must descend"
    out = policy.actor(steps.states)
    V = policy.critic(steps.states)[..., 0]
    peer = Categorical(logits=out) if policy.log_std is None else Normal(out, policy.log_std.exp())
    logp = peer.log_prob(steps.actions)
    S = peer.entropy()
    if policy.log_std is not None:
        logp = logp.sum(-1)
        S = S.sum(-1)
    nv = policy.critic(steps.next_states)[..., 0].detach()
    A = textbook(
        steps.rewards * config.reward_scale,
        V.detach(),
        nv,
        steps.terminated,
        steps.truncated,
        config.gamma,
        config.lam,
    )
    R = A + V.detach().double()
    A = (A - A.mean()) / A.std()
    ratio = (logp - logp.detach()).exp()
    policy_part = -torch.minimum(
        ratio * A, ratio.clamp(1 - config.clip, 1 + config.clip) * A
    ).mean()
    return policy_part + config.vf_coef * ((V - R) ** 2).mean() / 2 - config.ent_coef * S.mean()


@pytest.mark.parametrize("env_id", [POLE, PENDULUM])
def test_update_descends_the_loss_written_out(env_id):
    config = ControlConfig(
        envs=3,
        steps=210,
        total_steps=1000,
        epochs=1,
        minibatches=1,
        max_grad_norm=1e9,
        ent_coef=0.03,
        reward_scale=0.3,
        gamma=0.9,
    )
    envs = Environments(env_id, 3)
    policy = policy_for(env_id).double()
    steps = control.collect(envs, policy_for(env_id), 210, torch.Generator().manual_seed(0))
    steps = Steps(*(x.double() if x.is_floating_point() else x for x in vars(steps).values()))
    assert (steps.terminated if env_id == POLE else steps.truncated).any()
    parameters = list(policy.parameters())
    want = torch.autograd.grad(by_hand(policy, steps, config), parameters)
    before = [p.detach().clone() for p in parameters]
    meters = control.update(policy, torch.optim.SGD(parameters, lr=1.0), steps, config)
    for p, b, g in zip(parameters, before, want):
        close(b - p.detach(), g, atol=1e-9, rtol=1e-6)
    assert (
        abs(meters["approx_kl"]) < 1e-12
        and meters["clip_fraction_low"] == meters["clip_fraction_high"] == 0
    )


def test_evaluate_counts_whole_first_episodes():
    class Right(ControlPolicy):
        def sample(self, states, generator=None, greedy=False):
            return torch.ones(len(states), dtype=torch.long)

    class Balanced(ControlPolicy):
        def sample(self, states, generator=None, greedy=False):
            return (states[:, 2] + 0.3 * states[:, 3] > 0).long()

    falls = control.evaluate(Right(4, 2, False), POLE, 30)
    assert (
        falls.shape == (30,) and falls.min() >= 7 and falls.max() <= 12
    )  # always right: 8 to 10 steps
    assert control.evaluate(Balanced(4, 2, False), POLE, 3).tolist() == [500.0] * 3
    policy = policy_for(PENDULUM)
    assert torch.equal(
        control.evaluate(policy, PENDULUM, 2, seed=5), control.evaluate(policy, PENDULUM, 2, seed=5)
    )
    assert not torch.equal(
        control.evaluate(policy, PENDULUM, 2, seed=5),
        control.evaluate(policy, PENDULUM, 2, seed=5, greedy=False),
    )
