"""Limits, defaults and what is put back on the training floor, with numbers worked out by hand: what small changes of the code once
got past."""
import dataclasses
import io
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import normalizers
from torch import nn

from instruct_goose.doctor.log import Run, above
from instruct_goose.doctor.rules import reward_scale, start_kl
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint
from instruct_goose.runs.evaluation import text_table
from instruct_goose.runs.run_directory import RunLog, append_jsonl, claim_run_dir, write_json
from instruct_goose.runs.state import (
    check_random_state,
    environment,
    fingerprint_of_tokenizer,
    load_training_state,
    random_state,
    training_state,
)
from instruct_goose.supervised.dpo import train_dpo
from instruct_goose.supervised.fit import check_log
from instruct_goose.supervised.reward_model_training import pair_accuracy
from instruct_goose.supervised.sft import train_lm
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.metrics import of_scores
from instruct_goose.training.rewards import answer, check_scores
from instruct_goose.training.rollout import EVALUATION, Rollout, generator

TOKENIZER = word_tokenizer([f"w{i}" for i in range(9)], 20, pad="<end>", bos="<end>", eos="<end>")
def test_a_record_may_hold_what_has_a_text_and_its_names_in_any_order(tmp_path):
    record = {"where": tmp_path, "b": [1, {"z": 2, "a": None}], "a": .1}
    path = save_checkpoint(tmp_path, {"w": torch.ones(2)}, record)
    expected = record | {"where": str(tmp_path)}
    assert load_checkpoint(path)[1] == expected
    whole = json.loads((path / "record.json").read_text("utf-8"))
    (path / "record.json").write_text(json.dumps(whole, sort_keys=True), "utf-8")  # as another program might keep it
    assert list(json.loads((path / "record.json").read_text("utf-8"))["record"]) == ["a", "b", "where"] and load_checkpoint(path)[1] == expected


def test_a_rule_of_markdown_has_three_dashes_at_least():
    assert text_table(["a", "long"], [["b", 1.]]) == "| a   | long  |\n|-----|-------|\n| b   | 1.000 |"


@pytest.fixture
def no_default_encoding(monkeypatch):
    "A file that is opened as text without saying in which encoding is read otherwise on another system."
    def named(encoding, stacklevel=2):
        assert encoding is not None, "no encoding"
        return encoding
    monkeypatch.setattr(io, "text_encoding", named)


def test_files_are_utf8_everywhere_and_json_has_no_nan(tmp_path, no_default_encoding):
    run = claim_run_dir(tmp_path / "deep/down/run")
    append_jsonl(run / "log", {"β": 1.})
    append_jsonl(run / "log", {"x": float("nan")})
    write_json(run / "one", {"β": run})
    assert (run / "log").read_bytes().decode() == '{"β": 1.0}\n{"x": null}\n' and json.loads((run / "one").read_bytes()) == {"β": str(run)}
    with pytest.raises(ValueError): write_json(run / "two", {"x": float("nan")})
    assert sorted(p.name for p in run.iterdir()) == ["log", "one"]


@pytest.mark.parametrize("place,fits", [(0, True), (624, True), (625, False), (-1, False)])
def test_numpys_place_is_among_its_words(place, fits):
    numpy = pytest.importorskip("numpy")
    numpy.random.rand()
    state = random_state()
    state["numpy_rest"] = torch.tensor([float(place), 0., 0.], dtype=torch.float64)
    if fits: check_random_state(state)
    else:
        with pytest.raises(ValueError, match="malformed"): check_random_state(state)


def one_training():
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    adam = torch.optim.AdamW(net.parameters(), lr=.1)
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    return net, adam, {"dice": torch.Generator().manual_seed(3)}


def test_a_training_that_goes_on_elsewhere_says_so_and_takes_no_other_dice():
    net, adam, dice = one_training()
    tensors, record = training_state(net, adam, dice)
    with pytest.warns(UserWarning, match="torch was 0.1"):
        load_training_state(net, adam, dice, tensors, record | {"environment": environment() | {"torch": "0.1"}})
    for wrong in ({}, dice | {"more": torch.Generator()}, {"other": torch.Generator()}):
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(ValueError): load_training_state(net, adam, wrong, {k: x + 1 if k.startswith("model") else x for k, x in tensors.items()}, record)
        assert all(p.equal(q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("lr", [0., None, -1e-9, float("nan"), "x"], ids=str)
def test_a_learning_rate_that_is_none(lr):
    net, adam, dice = one_training()
    tensors, record = training_state(net, adam, dice)
    settings = {k: x for k, x in record["groups"][0]["settings"].items() if k != "lr"} | ({} if lr is None else {"lr": lr})
    forged = record | {"groups": [record["groups"][0] | {"settings": settings}]}
    if lr == 0.:
        load_training_state(net, adam, dice, tensors, forged)
        assert adam.param_groups[0]["lr"] == 0.
    else:
        with pytest.raises(ValueError, match="learning rate is"): load_training_state(net, adam, dice, tensors, forged)


@pytest.mark.parametrize("log,names,says", [
    ({"loss": 2, "lr": 2}, ["loss", "lr"], None), ({"loss": 3}, ["loss"], None), ({"loss": 2}, ("loss",), "log is missing"), ({"loss": 2}, ["loss", "lr"], "log is missing"),
    ({"lr": 2}, ["lr"], "log is missing"), ({"loss": 2, "lr": 1}, ["loss", "lr"], "columns differ"), ({"loss": 0}, ["loss"], "0 updates, of 3"),
    ({"loss": 4}, ["loss"], "4 updates, of 3")])
def test_a_log_of_a_stage(log, names, says):
    columns = {name: torch.zeros(n, dtype=torch.float64) for name, n in log.items()}
    if says is None: assert check_log(columns, names, 3) == log["loss"]
    else:
        with pytest.raises(ValueError, match=says): check_log(columns, names, 3)


def test_the_kl_of_the_start_may_be_rounding():
    at = lambda *kls: start_kl(Run([{"kl_to_reference": x} for x in kls]))
    assert at(1e-3, 5.) is None and at(0.) is None and at(.0011).startswith("kl_to_reference is 0.0011 in iteration 0")


@pytest.mark.parametrize("scores,std", [([1., 3.], math.sqrt(2)), ([5.], 0.), ([1., 1., 4.], math.sqrt(3))])
def test_the_spread_of_few_rewards(scores, std):
    "Divided by one less than their number, and 0 of one alone."
    ids, n = torch.zeros(len(scores), 1, dtype=torch.long), len(scores)
    r = Rollout(ids, ids == 0, ids, ids == 0, scores=torch.tensor(scores, dtype=torch.float64))
    found = of_scores(r, RLHFConfig())
    assert found["reward_std"].item() == pytest.approx(std) and found["reward_mean"].item() == pytest.approx(sum(scores) / n)
    assert (found["reward_min"].item(), found["reward_max"].item(), found["flat_groups"]) == (min(scores), max(scores), None)


def gpt2(seed):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(TOKENIZER), n_embd=8, n_layer=1, n_head=2, n_positions=20, resid_pdrop=0.,
                                                                 embd_pdrop=0., attn_pdrop=0., bos_token_id=TOKENIZER.eos_token_id, eos_token_id=TOKENIZER.eos_token_id))
    for p in model.parameters(): torch.nn.init.normal_(p, std=.5)
    return model.double()


def test_margin_and_accuracy_of_dpo_by_hand():
    "m = log π/π_ref of the chosen − log π/π_ref of the rejected, by plain forwards; right where it is above 0."
    pairs = [("w0 w1", "w2"), ("w3", "w4 w5 w6"), ("w7 w7", "w8 w1"), ("w1", "w0"), ("w2 w4", "w6 w0 w3")]
    model, ref = gpt2(0), gpt2(1)
    def logp(m, text):
        ids = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]  # which begin with the token that begins every text
        table = m.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(table[i, a].item() for i, a in enumerate(ids[1:]))
    margins = [logp(model, c) - logp(ref, c) - logp(model, r) + logp(ref, r) for c, r in pairs]
    chosen, rejected = (sum(logp(model, pair[k]) for pair in pairs) / 5 for k in (0, 1))
    (log,) = train_dpo(model, TOKENIZER, pairs, steps=1, lr=1e-4, ref_model=ref, beta=.5, batch_size=5, progress=False)
    assert (log["chosen_logprob"], log["rejected_logprob"]) == (pytest.approx(chosen, abs=1e-6), pytest.approx(rejected, abs=1e-6))
    assert log["margin"] == pytest.approx(sum(margins) / 5, abs=1e-6) and log["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 5)
    assert log["loss"] == pytest.approx(sum(math.log1p(math.exp(-.5 * m)) for m in margins) / 5, abs=1e-6) and 0 < log["accuracy"] < 1


@pytest.mark.parametrize("scores,error,says", [(None, TypeError, "a NoneType"), (torch.zeros(2, 1), ValueError, r"shape \(2, 1\)"), ([1.], ValueError, "1 scores")], ids=str)
def test_scores_are_refused_with_place_and_kind(scores, error, says):
    with pytest.raises(error, match=f"^iteration 3: the reward function returned {says} for 2 held-out texts"):
        check_scores(scores, ["a", "b"], kind="held-out text", where="iteration 3: ")


def test_a_judge_that_forgets_a_text_is_no_judge():
    answers = iter([[1., 2.], [0.]])
    with pytest.raises(ValueError, match="shorter"): pair_accuracy(lambda texts: next(answers), [("a", "b"), ("c", "d")])
    answers = iter([[1., 2., 0.], [0., 2., 3.]])  # won, drawn, lost
    assert pair_accuracy(lambda texts: next(answers), [("a", "b"), ("c", "d"), ("e", "f")]) == .5


def test_settings_are_written_by_name(tmp_path):
    write_json(tmp_path / "config.json", RLHFConfig(steps=3, kl_stop=2.))
    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == dataclasses.asdict(RLHFConfig(steps=3, kl_stop=2.))
    write_json(tmp_path / "kind.json", {"kind": RLHFConfig})
    assert "RLHFConfig" in json.loads((tmp_path / "kind.json").read_text("utf-8"))["kind"]


def test_the_log_of_a_run_tells_its_stage_how_far_it_is(tmp_path, unchecked, monkeypatch):
    told = []
    monkeypatch.setattr("instruct_goose.runs.run_directory.seen_tokens", lambda *_: [])
    stage = SimpleNamespace(after_step=lambda at, of, state: told.append((at, of, state())), saved=None)
    trainer = SimpleNamespace(iteration=2, now=None, tokenizer=None, config=RLHFConfig(steps=7), state=lambda: ({"w": 3}, {"iteration": 2}))
    with unchecked(): RunLog(tmp_path, stage).on_iteration(trainer, None, {"x": float("nan"), "iteration": 1})
    row = {"x": None, "iteration": 1}
    assert told == [(2, 7, ({"w": 3}, {"iteration": 2, "metrics": [row]}))]
    assert json.loads((tmp_path / "metrics.jsonl").read_text("utf-8")) == row


def test_tokenizers_that_cut_a_text_otherwise_are_two(unchecked):
    one, other = (word_tokenizer(["good", "film"], 20) for _ in range(2))
    assert fingerprint_of_tokenizer(one) == fingerprint_of_tokenizer(other)
    other.backend_tokenizer.normalizer = normalizers.Replace("film", "good")  # the same words, the same special ones
    assert fingerprint_of_tokenizer(one) != fingerprint_of_tokenizer(other)
    plain = [SimpleNamespace(get_vocab=lambda n=n: {"a": n}, special_tokens_map={}) for n in (0, 0, 1)]  # one written in Python
    with unchecked(): found = [fingerprint_of_tokenizer(x) for x in plain]
    assert found[0] == found[1] != found[2]


def test_of_a_generator_one_score_too_many_is_read():
    "So that too many are noticed, and one without end ends."
    assert answer(lambda texts: itertools.count(), {"texts": ["a", "b"]}) == [0, 1, 2]
    assert answer(lambda texts: [4], {"texts": ["a", "b"]}) == [4]


def test_a_spread_of_four_is_too_large():
    assert reward_scale(Run([{"return_std": x} for x in (1., 4., 9.)])) == "return_std is 4 in the median iteration"
    assert reward_scale(Run([{"return_std": x} for x in (1., 3.99, 9.)])) is None


def test_a_seed_has_a_million_streams_and_evaluation_the_last():
    assert EVALUATION == 1_048_575 and generator(1, 0).initial_seed() == generator(0, EVALUATION).initial_seed() + 1


def test_a_supervised_stage_keeps_every_tenth_state_in_memory(unchecked):
    told = []
    stage = SimpleNamespace(after_step=lambda at, of, state, often: told.append((at, of, often)), saved=None)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=7, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with unchecked(): train_lm(model, word_tokenizer("a good film is".split()), ["a good film"] * 4, steps=2, batch_size=2, lr=1e-3, seed=0, progress=False, stage=stage)
    assert told == [(1, 2, 10), (2, 2, 10)]


def test_at_the_limit_is_not_above_it():
    run = Run([{"entropy": 1.}, {"entropy": 1.}])
    assert above(run, "entropy", 1.) is None and above(run, "entropy", .99).startswith("entropy is above 0.99 in 2 of 2 iterations")
