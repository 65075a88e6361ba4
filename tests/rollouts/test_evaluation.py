"Oracles: enumeration of a small world, all groups of n, one row at a time."

import itertools
import math

import pytest
import torch
from small_models import families, tiny

from instruct_goose.models.agent import Agent
from instruct_goose.models.tokens import pad
from instruct_goose.rollouts.evaluation import best_of_n, generate, kl_to_reference, plot_metrics
from instruct_goose.rollouts.rollout import Rollout, finished


def world(T, V=9, end=0):
    "All responses of at most T tokens."
    others = [v for v in range(V) if v != end]
    rows = [[*r, end] for n in range(T) for r in itertools.product(others, repeat=n)]
    rows += [list(r) for r in itertools.product(others, repeat=T)]
    return Rollout(
        torch.tensor([[0, 3]] * len(rows)),
        torch.ones(len(rows), 2, dtype=torch.bool),
        *pad(rows, 5),
    )


@families
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_kl_to_reference_is_the_enumerated_kl(name, temperature):
    model, reference = tiny(name, 0, 0.4), tiny(name, 1, 0.4)
    every = world(2)

    @torch.no_grad()
    def log_probabilities(model):
        sums = []
        for query, ids, mask in zip(every.query_ids, every.response_ids, every.mask, strict=True):
            response = ids[mask]
            logits = model(torch.cat([query, response])[None]).logits[0, 1:-1].double()
            logprobs = (logits / temperature).log_softmax(-1)
            sums.append(logprobs.gather(-1, response[:, None]).sum())
        return torch.stack(sums)

    log_p, log_q = log_probabilities(model), log_probabilities(reference)
    p = log_p.exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    expected = (p * (log_p - log_q)).sum().item()
    assert expected > 0.005

    each = kl_to_reference(model.train(), reference, every, temperature, batch_size=7)

    assert (p * each).sum().item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert each.min() >= 0
    assert kl_to_reference(model, model, every).abs().max() < 1e-6
    assert kl_to_reference(Agent(model), reference, every, temperature).allclose(each, atol=1e-5)


def all_groups(n):
    "Every group of n of four texts, whose numbers are their tokens."
    texts = torch.tensor(list(itertools.product(range(4), repeat=n))).flatten()
    one = torch.ones(len(texts), 1, dtype=torch.bool)
    return Rollout(
        torch.zeros(len(texts), 1, dtype=torch.long),
        one,
        texts[:, None],
        one,
        texts=[str(i) for i in texts.tolist()],
    )


def test_best_of_n_keeps_each_text_as_often_as_the_formula_says():
    "F(s)ⁿ − F(below s)ⁿ; among all 4³ groups, weighted by the probabilities of their texts."
    p = [0.4, 0.3, 0.2, 0.1]
    scores = [0.5, 2.0, -1.0, 3.0]
    n = 3
    drawn = all_groups(n)
    kept, kept_scores = best_of_n(drawn, [scores[int(text)] for text in drawn.texts], n)
    assert kept_scores == [scores[int(text)] for text in kept.texts]

    share = [0.0] * 4
    groups = drawn.response_ids.view(-1, n).tolist()
    for group, text in zip(groups, kept.texts, strict=True):
        share[int(text)] += math.prod(p[i] for i in group)
    at_most = 0.0
    for i in sorted(range(4), key=lambda i: scores[i]):
        below = at_most
        at_most += p[i]
        assert share[i] == pytest.approx(at_most**n - below**n)
    kl = sum(s * math.log(s / q) for s, q in zip(share, p, strict=True))
    assert kl <= math.log(n) - (n - 1) / n


@pytest.mark.parametrize(
    "scores, n", [([0.0] * 5, 3), ([0.0] * 192, 5), ([0.0] * 192, 0), ([0.0] * 191 + [math.nan], 3)]
)
def test_best_of_n_refuses_groups_that_are_not_whole_and_scores_that_are_not_finite(scores, n):
    with pytest.raises(ValueError, match="groups of"):
        best_of_n(all_groups(3), scores, n)


@pytest.mark.parametrize("batch_size", [2, 256])
def test_responses_come_in_the_order_of_the_prompts(tokenizer, batch_size):
    prompts = ["the film is good", "", "a", "bad plot", "good"]

    def texts_of(seed):
        return generate(tiny(), tokenizer, prompts, 6, seed=seed, batch_size=batch_size)

    rollout = texts_of(seed=4)
    assert rollout.prompts == prompts and len(rollout) == 5
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt)["input_ids"]
        assert rollout.query_ids[i][rollout.query_mask[i]].tolist() == ids
        response = rollout.response_ids[i][rollout.mask[i]].tolist()
        assert 0 not in response[:-1]
        assert finished(rollout, 0)[i].item() == (response[-1] == 0)
        assert rollout.texts[i] == tokenizer.decode(ids + response, skip_special_tokens=True)
    assert texts_of(seed=4).texts == rollout.texts
    assert texts_of(seed=5).texts != rollout.texts


def test_plots_are_of_what_was_logged(tmp_path):
    metrics = []
    for i in range(3):
        row = {"iteration": i, "reward_mean": i / 2, "kl_to_reference": 0.1 * i}
        metrics.append(row | {"entropy": 1.0, "clip_fraction": None})
    paths = plot_metrics(metrics, tmp_path)
    assert [path.name for path in paths] == ["reward_and_kl.png", "entropy.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert plot_metrics([], tmp_path) == []
