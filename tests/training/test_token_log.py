"""The record of a few responses: numbers against slow sums, no dice thrown, and files that a person may have touched."""

import json
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.doctor.report import QUANTITIES, read_tokens
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.objective.policy_loss import SURROGATES, held_shares, held_tokens
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.token_log import four_digits, record_tokens, response_notes

WORDS = "the film plot is was good dull bad".split()


def tiny(tokenizer):
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=12,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


class Keep(Callback):
    "The record of each iteration, with the rollout and what the policy says after the update."

    def __init__(self, rows=4):
        self.rows, self.seen = rows, []

    def on_iteration(self, trainer, rollout, metrics):
        with torch.no_grad():
            now = trainer.now(rollout).logprobs
        self.seen.append(
            (
                record_tokens(trainer.now, rollout, trainer.config, trainer.tokenizer, self.rows),
                rollout,
                now,
            )
        )


def trained(keep, steps=2, **settings):
    config = RLHFConfig(
        **{
            "steps": steps,
            "batch_size": 8,
            "max_new_tokens": 5,
            "lr": 3e-2,
            "seed": 0,
            "device": "cpu",
        }
        | settings
    )
    tokenizer = word_tokenizer(WORDS)
    trainer = RLHFTrainer(
        tiny(tokenizer), config=config, tokenizer=tokenizer, callbacks=[keep] if keep else []
    )
    log = trainer.train(
        ["the film is", "the"],
        lambda texts: [float(t.split().count("good")) for t in texts],
        progress=False,
    )
    return trainer, log


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantage": "group_mean_std", "group_size": 4, "beta": 0.0},
        {"surrogate": "weight"},
        {"ratio_level": "sequence"},
        {"dual_clip": 1.5},
    ],
    ids=str,
)
def test_each_number_is_the_one_of_its_token(settings):
    keep = Keep(3)
    trainer, _ = trained(keep, **settings)
    for seen, r, now in keep.seen:
        stride = math.ceil(len(r) / 3)
        assert ("group" in response_notes(r, [0], trainer.config, None)[0]) == (
            "group_size" in settings
        )
        assert len(seen) == len(range(0, len(r), stride)) <= 3
        for response, row in zip(seen, range(0, len(r), stride), strict=True):
            length = int(r.mask[row].sum())
            assert response["prompt"] == r.prompts[row] and response["score"] == pytest.approx(
                r.scores[row].item(), abs=1e-3
            )
            assert (
                len(response["tokens"]) == length
                and [t for t in response["tokens"] if t[0] != "<"]
                == r.texts[row].removeprefix(r.prompts[row]).split()
            )
            moved = [(now[row, t] - r.old_logprobs[row, t]).item() for t in range(length)]
            assert response["moved"] == pytest.approx(moved, abs=2e-3)
            if settings.get("ratio_level") == "sequence":
                moved = [sum(moved) / length] * length
            for name, column in (
                ("advantages", r.advantages),
                ("rewards", r.rewards),
                ("kl", r.kl),
                ("old_logprobs", r.old_logprobs),
                ("ref_logprobs", r.ref_logprobs),
            ):
                assert response[name] == pytest.approx(
                    column[row, :length].tolist(), rel=1e-3, abs=1e-3
                ), name
            assert ("values" in response) == (r.values is not None)
            for held, m, a in zip(response["held"], moved, response["advantages"], strict=True):
                rho = math.exp(m)
                if min(abs(rho - 0.8), abs(rho - 1.2), abs(rho - 1.5), abs(a)) < 5e-3:
                    continue  # rounding may decide
                slow = (
                    (rho > 1.2 or rho < 0.8)
                    if "surrogate" in settings
                    else (rho > 1.2 and a > 0) or (rho < 0.8 and a < 0)
                )
                assert held == (slow or (a < 0 and rho > settings.get("dual_clip", math.inf)))


def test_watching_changes_nothing():
    (alone, log), (watched, again) = trained(None), trained(Keep())
    for a, b in zip(alone.agent.parameters(), watched.agent.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [m["reward_mean"] for m in log] == [m["reward_mean"] for m in again]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_shares_count_the_held_tokens(surrogate):
    g = torch.Generator().manual_seed(0)
    ratio, advantages = torch.rand(3, 5, generator=g) * 2, torch.randn(3, 5, generator=g)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    shares = held_shares(surrogate, ratio, advantages, mask)
    for side, where in held_tokens(surrogate, ratio, advantages, mask).items():
        assert shares[f"clip_fraction_{side}"].item() == pytest.approx(
            sum(where[mask].tolist()) / int(mask.sum())
        )


def test_nan_is_not_recorded():
    assert (
        four_digits(torch.tensor(math.nan)) is None is four_digits(torch.tensor(math.inf))
        and four_digits(torch.tensor(1.23456)) == 1.235
    )


def test_a_record_that_was_cut_or_written_twice(tmp_path):
    response = {"prompt": "", "score": 1.0, "tokens": ["a"], "held": [False]} | {
        name: [0.5] for name in QUANTITIES
    }

    def line(n, x):
        return json.dumps({"iteration": n, "responses": [response | {"moved": [x]}]})

    path = tmp_path / "tokens.jsonl"
    path.write_text(
        "\n".join([line(0, 1.0), line(1, 2.0), line(1, 3.0), "", line(2, 4.0)[:-9]]), "utf-8"
    )
    assert {n: r[0]["moved"] for n, r in read_tokens(path).items()} == {0: [1.0], 1: [3.0]}
    path.write_text(line(0, 1.0)[:30] + "\n" + line(1, 2.0) + "\n", "utf-8")
    with pytest.raises(ValueError, match="line 1"):
        read_tokens(path)


def test_under_rloo_each_token_has_its_own_ratio_and_nothing_is_held_by_the_only_update():
    "The preset's one update starts at a ratio of 1, so the clip fraction is 0."
    group = dict(
        advantage="leave_one_out", group_size=4, ratio_level="product", aggregation="sequence_mean"
    )
    keep = Keep()
    _, log = trained(keep, epochs=1, minibatches=1, **group)
    long = [r for seen, *_ in keep.seen for r in seen if len(r["tokens"]) > 1]
    assert (
        long
        and all(len(set(r["moved"])) > 1 for r in long)
        and not any(x for r in long for x in r["held"])
        and log[-1]["clip_fraction"] == 0
    )
    keep = Keep()
    trained(keep, epochs=4, minibatches=2, **group)
    assert any(x for seen, *_ in keep.seen for r in seen for x in r["held"])
