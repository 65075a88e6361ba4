"Oracles: enumeration of a small world, all groups of n, one row at a time."

import itertools
import math

import pytest
import torch
from small_models import families, tiny

from instruct_goose.core.files import text_table
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
    model, reference, every = tiny(name, 0, 0.4), tiny(name, 1, 0.4), world(2)

    def log_p(m):
        out = []
        for q, r, real in zip(every.query_ids, every.response_ids, every.mask, strict=True):
            r = r[real]
            with torch.no_grad():
                z = m(torch.cat([q, r])[None]).logits[0, 1:-1].double() / temperature
            out.append(z.log_softmax(-1).gather(-1, r[:, None]).sum())
        return torch.stack(out)

    here, there = log_p(model), log_p(reference)
    assert here.exp().sum().item() == pytest.approx(1, abs=1e-5)
    each = kl_to_reference(model.train(), reference, every, temperature, batch_size=7)
    expected = (here.exp() * (here - there)).sum().item()
    assert expected > 0.005 and (here.exp() * each).sum().item() == pytest.approx(
        expected, rel=1e-3, abs=1e-5
    )
    assert each.min() >= 0 and kl_to_reference(model, model, every).abs().max() < 1e-6
    assert kl_to_reference(Agent(model), reference, every, temperature).allclose(each, atol=1e-5)


def test_best_of_n_against_all_groups():
    "Probability of each text among all 4³ groups; ties go to the first, which no score can tell apart."
    p, scores, n = [0.4, 0.3, 0.2, 0.1], [0.5, 2.0, -1.0, 3.0], 3
    groups = torch.tensor(list(itertools.product(range(4), repeat=n)))
    one = torch.ones(groups.numel(), 1, dtype=torch.bool)
    drawn = Rollout(
        torch.zeros(groups.numel(), 1, dtype=torch.long),
        one,
        groups.reshape(-1, 1),
        one,
        texts=[str(i) for i in groups.flatten().tolist()],
    )
    kept, kept_scores = best_of_n(drawn, [scores[i] for i in groups.flatten().tolist()], n)
    share = [0.0] * 4
    for group, text in zip(groups.tolist(), kept.texts, strict=True):
        share[int(text)] += math.prod(p[i] for i in group)
    order = sorted(range(4), key=scores.__getitem__)
    for k, i in enumerate(order):
        at_most, below = sum(p[j] for j in order[: k + 1]), sum(p[j] for j in order[:k])
        assert share[i] == pytest.approx(at_most**n - below**n)
    assert kept_scores == [scores[int(t)] for t in kept.texts]
    assert (
        sum(s * math.log(s / q) for s, q in zip(share, p, strict=True)) <= math.log(n) - (n - 1) / n
    )
    for wrong in (
        ([0.0] * 5, 3),
        ([0.0] * 192, 5),
        ([0.0] * 192, 0),
        ([0.0] * 191 + [math.nan], 3),
    ):
        with pytest.raises(ValueError, match="groups of"):
            best_of_n(drawn, *wrong)


@pytest.mark.parametrize("batch_size", [2, 256])
def test_write_keeps_order_prompts_and_widths(tokenizer, batch_size):
    model, prompts = tiny(), ["the film is good", "", "a", "bad plot", "good"]
    rollout = generate(model, tokenizer, prompts, 6, seed=4, batch_size=batch_size)
    assert rollout.prompts == prompts and len(rollout) == 5
    for i, prompt in enumerate(prompts):
        assert (
            rollout.query_ids[i][rollout.query_mask[i]].tolist() == tokenizer(prompt)["input_ids"]
        )
        response = rollout.response_ids[i][rollout.mask[i]].tolist()
        assert 0 not in response[:-1] and finished(rollout, 0)[i].item() == (response[-1] == 0)
        whole = tokenizer.decode(
            tokenizer(prompt)["input_ids"] + response, skip_special_tokens=True
        )
        assert rollout.texts[i] == whole
    assert (
        generate(model, tokenizer, prompts, 6, seed=4, batch_size=batch_size).texts == rollout.texts
    )
    assert (
        generate(model, tokenizer, prompts, 6, seed=5, batch_size=batch_size).texts != rollout.texts
    )


def test_text_table_lines_up_and_escapes():
    table = text_table(["", "a|b"], [["x", 1.23456], ["two\u2028lines", None], [True, 12]])
    assert table.splitlines() == [
        "|           | a\\|b  |",
        "|-----------|-------|",
        "| x         | 1.235 |",
        "| two lines | –     |",
        "| True      | 12    |",
    ]
    assert text_table(["a"], [["b"]]) == "| a   |\n|-----|\n| b   |"


def test_plots_are_of_what_was_logged(tmp_path):
    metrics = [
        {
            "iteration": i,
            "reward_mean": i / 2,
            "kl_to_reference": 0.1 * i,
            "entropy": 1.0,
            "clip_fraction": None,
        }
        for i in range(3)
    ]
    assert [p.name for p in plot_metrics(metrics, tmp_path)] == ["reward_and_kl.png", "entropy.png"]
    assert (
        all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.iterdir())
        and plot_metrics([], tmp_path) == []
    )
