"""The playground's model: its random numbers, its rollout, its reward by hand, and that training does what the page says."""

import copy
import json
from pathlib import Path

import pytest
import torch

from instruct_goose.tasks import playground
from instruct_goose.tasks.film_reviews import write_reviews

root = Path(__file__).parents[2]
START = root / "docs/playground/start.json"


@pytest.fixture(scope="module")
def start():
    return playground.read_start(START)


def test_splitmix32_in_plain_integers():
    def mixed(seed, n):
        x = (seed + n * 0x9E3779B9) % 2**32
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return (x ^ x >> 15) / 2**32

    g = playground.Splitmix32(2**32 - 5)
    assert g.uniform(3).tolist() + g.uniform(0).tolist() + g.uniform(500).tolist() == [
        mixed(2**32 - 5, n) for n in range(1, 504)
    ]
    many = playground.Splitmix32(1).uniform(100_000)
    assert (
        abs(many.mean() - 0.5) < 0.004
        and abs(many.var() - 1 / 12) < 0.002
        and abs(torch.corrcoef(torch.stack([many[1:], many[:-1]]))[0, 1]) < 0.01
    )


def test_reward_counts_words_inside_the_mask():
    weights = torch.arange(len(playground.WORDS), dtype=torch.float64)
    reward = playground.WordCountReward(weights, 0.5)
    ids = torch.tensor([[3, 3, 10, 0, 7], [5, 0, 0, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    assert reward(ids, mask).tolist() == [16.5, 5.5]


def test_a_sample_says_what_the_policy_says(start):
    policy = start[0].double()
    torch.nn.init.normal_(policy.value.weight)
    ids, mask, logprobs, values = playground.sample(policy, playground.Splitmix32(3), 40, 0.8)
    again, v, _ = playground.read(policy, ids, 0.8)
    torch.testing.assert_close(logprobs, torch.where(mask, again, 0.0).detach())
    torch.testing.assert_close(values, torch.where(mask, v, 0.0).detach())
    assert torch.equal(mask, playground.response_mask(ids, playground.END)) and not ids[~mask].any()
    torch.nn.init.zeros_(policy.value.weight)


def test_words_are_drawn_as_often_as_they_are_likely(start):
    first = playground.sample(start[0], playground.Splitmix32(5), 4000).ids[:, 0]
    expected = start[0](torch.zeros(5, dtype=torch.long))[0].softmax(-1).detach() * 4000
    likely = expected > 40
    chi2 = (
        (torch.bincount(first, minlength=len(playground.WORDS)) - expected)[likely].square()
        / expected[likely]
    ).sum()
    assert likely.sum() >= 5 and chi2 < 3 * likely.sum()


def test_the_start_is_written_and_read_to_the_bit(tmp_path, start):
    policy, reward = start
    playground.write_start(tmp_path / "a.json", policy, reward)
    assert (
        tmp_path / "a.json"
    ).read_bytes() == START.read_bytes() and START.stat().st_size < 300_000
    broken = json.loads(START.read_text("utf-8"))
    broken["words"][5] = "another"
    (tmp_path / "b.json").write_text(json.dumps(broken), "utf-8")
    with pytest.raises(ValueError, match="vocabulary"):
        playground.read_start(tmp_path / "b.json")


def test_sft_and_reward_model_learn():
    policy = playground.train_language_model(reviews=300, steps=40)
    reward = playground.train_reward(pairs=1500)
    ids = playground.encode(write_reviews(200, 9))
    mask = playground.response_mask(ids, playground.END)
    nats = -playground.read(policy, ids, 1.0)[0][mask].mean()
    assert nats < 4  # of log 481 = 6.2
    scores = reward(ids, mask)
    human = torch.tensor(playground.human_score(playground.decode(ids, mask)), dtype=torch.float64)
    assert torch.corrcoef(torch.stack([scores, human]))[0, 1] > 0.7


@pytest.mark.parametrize("algorithm", playground.ALGORITHMS)
def test_every_algorithm_raises_the_score(start, algorithm):
    reference, reward = start
    policy = copy.deepcopy(reference)
    made = list(
        playground.train(
            policy,
            reference,
            reward,
            playground.PlaygroundSettings(algorithm=algorithm, beta=0.1),
            20,
        )
    )
    assert made[-1].scores.mean() > made[0].scores.mean() + 1
    assert all(len(i.losses) == len(i.gradient_norms) == 4 for i in made)
    values_moved = not torch.equal(policy.value.weight, reference.value.weight)
    assert values_moved == (algorithm == "ppo")
