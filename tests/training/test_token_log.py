"""The record of a few responses.

Its numbers against slow sums; recording draws no random number; files may have been cut.
"""

import json
import math
import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.doctor.report import QUANTITIES, read_tokens
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.objective.policy_loss import SURROGATES, clipped_shares, clipped_tokens
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.token_log import (
    LossNotRecorded,
    four_digits,
    is_recorded,
    record_tokens,
    recorded_rows,
)

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
    "The record of each iteration, its experience, and log π after the update."

    def __init__(self, rows=4):
        self.rows = rows
        self.seen = []

    def on_iteration(self, trainer, experience, metrics):
        with torch.no_grad():
            logprobs = trainer.evaluate_tokens(experience).logprobs
        record = record_tokens(trainer, experience, self.rows)
        self.seen.append((record, experience, logprobs))


def trained(keep=None, steps=2, make=RLHFTrainer, **settings):
    small = dict(steps=steps, batch_size=8, max_new_tokens=5, lr=3e-2, seed=0, device="cpu")
    tokenizer = word_tokenizer(WORDS)
    trainer = make(
        tiny(tokenizer),
        config=RLHFConfig(**small | settings),
        tokenizer=tokenizer,
        callbacks=[keep] if keep else [],
    )
    log = trainer.train(
        ["the film is", "the"],
        lambda texts: [float(text.split().count("good")) for text in texts],
        progress=False,
    )
    return trainer, log


def recorded(rows=4, **settings):
    "Each recorded response with its experience, its row and log π after the update."
    keep = Keep(rows)
    trained(keep, **settings)
    for record, experience, logprobs in keep.seen:
        chosen = recorded_rows(experience, rows).tolist()
        assert len(record) == len(chosen) <= rows
        for response, row in zip(record, chosen, strict=True):
            yield response, experience, row, logprobs[row]


def test_every_second_recorded_response_answers_the_prompt_of_the_one_before():
    keep = Keep(4)
    trained(keep)
    for record, experience, _ in keep.seen:
        chosen = recorded_rows(experience, 4).tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) == 4
        prompts = [response["prompt"] for response in record]
        assert len(set(prompts)) == 2 or len(set(experience.prompts)) == 1
        assert all(prompts.count(prompt) % 2 == 0 for prompt in prompts)


def log_ratios(experience, row, logprobs):
    n = int(experience.mask[row].sum())
    return (logprobs - experience.old_logprobs[row])[:n].tolist()


SETTINGS = [
    {},
    {"advantage": "group_mean_std", "group_size": 4, "beta": 0.0, "max_kl_to_reference": 99.0},
    {"surrogate": "weight"},
    {"ratio_level": "sequence"},
    {"dual_clip": 1.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_number_is_the_one_of_its_token(settings):
    for response, r, row, logprobs in recorded(3, **settings):
        length = int(r.mask[row].sum())
        assert response["prompt"] == r.prompts[row]
        assert response["score"] == pytest.approx(r.scores[row].item(), abs=1e-3)
        assert len(response["tokens"]) == length
        words = [token for token in response["tokens"] if token[0] != "<"]
        assert words == r.texts[row].removeprefix(r.prompts[row]).split()
        assert response["log_ratio"] == pytest.approx(log_ratios(r, row, logprobs), abs=2e-3)
        for name in ("advantages", "rewards", "kl", "old_logprobs", "ref_logprobs"):
            column = getattr(r, name)[row, :length].tolist()
            assert response[name] == pytest.approx(column, rel=1e-3, abs=1e-3), name
        assert ("values" in response) == (r.values is not None)
        assert ("group" in response) == ("group_size" in settings)


def test_a_raw_score_is_what_the_reward_gave_and_an_end_is_an_end_token():
    shaping = {"reward_clip": 0.5, "missing_eos_penalty": 1.0}
    for response, r, row, _ in recorded(4, **shaping):
        count = r.texts[row].split().count("good")
        assert response["raw_score"] == count
        assert response["ended"] == (response["tokens"][-1] == "<eos>")
        expected = min(count, 0.5) - (0.0 if response["ended"] else 1.0)
        assert response["score"] == pytest.approx(expected)


def test_a_record_says_whether_the_scored_text_is_that_of_its_ids():
    keep = Keep(4)
    trainer, _ = trained(keep, steps=1)
    [(record, experience, _)] = keep.seen
    assert [response["same_text"] for response in record] == [True] * 4
    first = recorded_rows(experience, 4).tolist()[0]
    experience.texts[first] = "another text"
    again = record_tokens(trainer, experience, 4)
    assert [response["same_text"] for response in again] == [False, True, True, True]


class FirstWordLost(RLHFTrainer):
    "Prompts lose their first token on the way to the model."

    def encode(self, prompts):
        queries = super().encode(prompts)
        keep = queries.mask.clone()
        longest = queries.mask.sum(-1) > 1
        first = queries.mask.int().argmax(-1)
        keep[torch.arange(len(keep))[longest], first[longest]] = False
        return type(queries)(queries.ids, keep)


def test_where_the_ids_of_a_prompt_are_not_the_tokenizers_the_first_other_token_is_recorded():
    for response, *_ in recorded(4):
        assert response["prompt_difference"] is None
    keep = Keep()
    trained(keep, make=FirstWordLost)
    for record, *_ in keep.seen:
        for response in record:
            whole = response["columns"]["prompt"]
            if "film" in whole:
                assert response["prompt_difference"] == (
                    "token 0 is 'the' of 3 tokens, by the tokenizer '<bos>' of 4 tokens"
                )


def test_a_prompt_that_is_too_long_is_compared_with_its_end():
    tokenizer = word_tokenizer(WORDS)
    config = RLHFConfig(steps=1, batch_size=4, max_new_tokens=8, long_rows="cut", device="cpu")
    keep = Keep()
    trainer = RLHFTrainer(tiny(tokenizer), config=config, tokenizer=tokenizer, callbacks=[keep])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(["the film is good the plot is bad"] * 2, lambda t: [0.0] * len(t), 1)
    ((record, experience, _),) = keep.seen
    assert experience.query_mask.sum(-1).max() == 4
    assert all(response["prompt_difference"] is None for response in record)


def test_a_held_out_prompt_is_marked_in_the_record():
    tokenizer = word_tokenizer(WORDS)
    config = RLHFConfig(steps=1, batch_size=8, max_new_tokens=2, eval_every=1, device="cpu")
    keep = Keep()
    trainer = RLHFTrainer(tiny(tokenizer), config=config, tokenizer=tokenizer, callbacks=[keep])
    (metrics,) = trainer.train(
        ["the film", {"prompt": "the plot"}],
        lambda texts: [0.0] * len(texts),
        held_out=["the plot", "the film is"],
        progress=False,
    )
    assert metrics["prompts_held_out"] == 0.5
    for response in keep.seen[0][0]:
        assert response["is_held_out"] == (response["prompt"] == "the plot")


def is_held(ratio, advantage, surrogate, dual_clip):
    "Whether the clip holds a token: the rule in Python."
    if advantage < 0 and ratio > dual_clip:
        return True
    if surrogate == "min":
        return (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    return ratio > 1.2 or ratio < 0.8


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_token_is_held_where_the_clip_takes_its_gradient(settings):
    dual_clip = settings.get("dual_clip", math.inf)
    for response, r, row, logprobs in recorded(3, **settings):
        moved = log_ratios(r, row, logprobs)
        if settings.get("ratio_level") == "sequence":
            moved = [sum(moved) / len(moved)] * len(moved)
        for held, x, advantage in zip(
            response["clipped"], moved, response["advantages"], strict=True
        ):
            ratio = math.exp(x)
            edges = [abs(ratio - edge) for edge in (0.8, 1.2, 1.5)]
            if min(*edges, abs(advantage)) < 5e-3:
                continue  # rounding may decide
            surrogate = settings.get("surrogate", "min")
            assert held == is_held(ratio, advantage, surrogate, dual_clip)


def test_watching_changes_nothing():
    alone, log = trained()
    watched, again = trained(Keep())
    for a, b in zip(alone.agent.parameters(), watched.agent.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [m["reward_mean"] for m in log] == [m["reward_mean"] for m in again]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_shares_count_the_held_tokens(surrogate):
    g = torch.Generator().manual_seed(0)
    ratio = torch.rand(3, 5, generator=g) * 2
    advantages = torch.randn(3, 5, generator=g)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    shares = clipped_shares(surrogate, ratio, advantages, mask)
    for side, where in clipped_tokens(surrogate, ratio, advantages, mask).items():
        assert shares[f"clip_fraction_{side}"].item() == pytest.approx(
            sum(where[mask].tolist()) / int(mask.sum())
        )


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_recorded_as_none(x):
    assert four_digits(torch.tensor(x)) is None


def test_a_number_is_recorded_with_four_digits():
    assert four_digits(torch.tensor(1.23456)) == 1.235
    assert four_digits(torch.tensor(True)) is True


@pytest.mark.parametrize("steps", [1, 6, 60, 61, 1000])
def test_about_sixty_iterations_are_recorded_the_first_and_the_last_among_them(steps):
    chosen = [i for i in range(steps) if is_recorded(i, steps)]
    assert min(steps, 31) <= len(chosen) <= 61
    assert chosen[0] == 0
    assert chosen[-1] == steps - 1


def test_a_record_that_was_cut_or_written_twice(tmp_path):
    response = {"prompt": "", "score": 1.0, "tokens": ["a"], "clipped": [False]} | {
        name: [0.5] for name in QUANTITIES
    }

    def line(n, x):
        return json.dumps({"iteration": n, "responses": [response | {"log_ratio": [x]}]})

    path = tmp_path / "tokens.jsonl"
    path.write_text(
        "\n".join([line(0, 1.0), line(1, 2.0), line(1, 3.0), "", line(2, 4.0)[:-9]]), "utf-8"
    )
    assert {n: r[0]["log_ratio"] for n, r in read_tokens(path).items()} == {0: [1.0], 1: [3.0]}
    path.write_text(line(0, 1.0)[:30] + "\n" + line(1, 2.0) + "\n", "utf-8")
    with pytest.raises(ValueError, match="line 1"):
        read_tokens(path)


RLOO = dict(
    advantage="leave_one_out", group_size=4, ratio_level="product", aggregation="sequence_mean"
)


def test_under_rloo_each_token_has_its_own_log_ratio():
    long = [response for response, *_ in recorded(**RLOO) if len(response["tokens"]) > 1]
    assert long
    assert all(len(set(response["log_ratio"])) > 1 for response in long)


def test_a_loss_that_needs_more_rows_than_the_recorded_ones_is_named():
    class WholeBatch(RLHFTrainer):
        def loss(self, new, batch):
            if len(batch) != 8:
                raise ValueError("the whole batch, please")
            return super().loss(new, batch)

    keep = Keep()
    with pytest.warns(LossNotRecorded, match="of 4 responses alone .* ValueError: the whole batch"):
        trained(keep, make=WholeBatch, epochs=1, minibatches=1)
    assert all(
        "negative_gradient" not in response for record, *_ in keep.seen for response in record
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossNotRecorded)
        keep = Keep()
        trained(keep)
    assert all("negative_gradient" in response for record, *_ in keep.seen for response in record)


def test_the_only_update_of_an_iteration_holds_no_token():
    "It starts at a ratio of 1, so the clip fraction is 0."
    keep = Keep()
    _, log = trained(keep, epochs=1, minibatches=1, **RLOO)
    assert not any(held for record, *_ in keep.seen for r in record for held in r["clipped"])
    assert log[-1]["clip_fraction"] == 0


def test_several_updates_hold_some_tokens():
    responses = [response for response, *_ in recorded(epochs=4, minibatches=2, **RLOO)]
    assert any(held for response in responses for held in response["clipped"])
