"""Limits, defaults and what is put back on the training floor, with numbers worked out by hand: what small changes of the code once
got past."""
import dataclasses
import importlib
import inspect
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
    check_counters,
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
from instruct_goose.training.callbacks import Callback, usual_callbacks
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.metrics import of_scores
from instruct_goose.training.rewards import answer, check_scores
from instruct_goose.training.rollout import EVALUATION, Rollout, generator

TOKENIZER = word_tokenizer([f"w{i}" for i in range(9)], 20, pad="<end>", bos="<end>", eos="<end>")
ONE = dict(temperature=1.)
DEFAULTS = {  # a default that changes is a line for the changelog
    "instruct_goose.models.response": {"response_logprobs": ONE | dict(with_entropy=False), "response_logits": ONE},
    "instruct_goose.models.agent": {"Agent.evaluate": ONE | dict(with_entropy=True)},
    "instruct_goose.data.load": {name: dict(unique=False, repeat=False) for name in ("stream", "stream_pairs", "stream_prompts")},
    "instruct_goose.models.tokens": {"word_tokenizer": dict(model_max_length=1024, add_bos=True, add_eos=False),
                                       "bpe_tokenizer": dict(lowercase=True, model_max_length=1024, add_bos=True, add_eos=False, min_frequency=2)},
    "instruct_goose.models.reward_model": {"RewardModel.score": dict(batch_size=256)},
    "instruct_goose.training.annotate": {"next_token_logits": dict(chunk=512)},
    "instruct_goose.runs.checkpoints": {"save_checkpoint": dict(keep=2), "locked": dict(wait=False)},
    "instruct_goose.supervised.dpo": {"row_logprobs": dict(pad_id=0), "train_dpo": dict(beta=.1, label_smoothing=0., batch_size=64, seed=0)},
    "instruct_goose.runs.evaluation": {"write": ONE | dict(seed=0, batch_size=256, greedy=False), "held_out_answers": dict(greedy=False), "kl_to_reference": ONE | dict(batch_size=64)},
    "instruct_goose.supervised.fit": {"batches": dict(seed=0), "cosine": dict(warmup=0, floor=0.),
                                    "fit": dict(weight_decay=.01, floor=0., max_grad_norm=1., progress=True)},
    "instruct_goose.runs.resume": {"CheckpointManager.__init__": dict(keep=2), "Stage.after_step": dict(often=1)},
    "instruct_goose.supervised.reward_model_training": {"train_reward_model": dict(batch_size=64, seed=0),
                                                "train_reward_model_on_ratings": dict(batch_size=32, seed=0)},
    "instruct_goose.training.rollout": {"draw": ONE, "probabilities": ONE, "sample": ONE | dict(greedy=False, with_logprobs=False), "collect": ONE | dict(greedy=False)},
    "instruct_goose.runs.run_directory": {"train_policy": dict(progress=True, track_every=10)},
    "instruct_goose.supervised.sft": {"train_lm": dict(seed=0), "lm_nats": dict(batch_size=128)},
    "instruct_goose.training.trainer": {"RLHFTrainer.update": dict(first=False), "RLHFTrainer.train": dict(progress=True)},
}


@pytest.mark.parametrize("module", DEFAULTS)
def test_defaults_of_functions(module):
    for name, expected in DEFAULTS[module].items():
        f = importlib.import_module(module)
        for part in name.split("."): f = getattr(f, part)
        found = {p.name: p.default for p in inspect.signature(f).parameters.values() if isinstance(p.default, bool | int | float)}
        assert found == expected and [type(x) for x in found.values()] == [type(x) for x in expected.values()], name


def test_defaults_of_the_settings():
    assert {f.name: f.default for f in dataclasses.fields(RLHFConfig)} == dict(
        steps=50, seed=0, device="auto", eval_every=None, eval_greedy=False, keep_best=False, kl_stop=None, reward_weights=None, reward_weighting="raw", reward_scaling=None, reward_clip=None, missing_eos_penalty=None, overlong_buffer=None, mask_truncated=False, reward_timeout=None, recheck_every=None, redraw_flat=0, drop_flat=False,
        batch_size=64, group_size=1, max_new_tokens=32, temperature=1., stop_strings=None, advantage="gae", group_ddof=1, whiten_advantages=True, gamma=1., lam=.95,
        ratio_level="token", surrogate="min", clip=.2, clip_high=None, dual_clip=None, value_clip=.2, vf_coef=.5, ent_coef=0., entropy_target=None, entropy_step=.005,
        aggregation="token_mean", importance_cap=None, importance_floor=None, importance_level="token", importance_beyond="cut", beta=.1, kl_placement="reward", kl_estimator=None, kl_gradient="plain", kl_target=None, ref_every=None, ref_mixup=1.,
        epochs=2, kl_early_stop=None, minibatches=2, micro_batch_size=None, autocast=None, lr=1e-5, value_lr=None, lr_schedule="constant", weight_decay=0., max_grad_norm=1.)


class OneTrainer:
    def __init__(self): self.config, self.callbacks = RLHFConfig(kl_stop=3.), [Callback()]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_after_a_run_the_trainer_has_its_own_callbacks_again(error):
    t = OneTrainer()
    own, called = list(t.callbacks), []
    try:
        with usual_callbacks(t, 1, None, None, called.append, False):
            assert [type(c).__name__ for c in t.callbacks] == ["Callback", "StopAtKL", "CallFunction", "Progress"]
            if error: raise error
    except KeyboardInterrupt: pass
    assert t.callbacks == own


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


@pytest.mark.parametrize("change,fits", [
    (dict(iteration=0, best_iteration=None), True), (dict(iteration=1), False), (dict(best_iteration=3), True), (dict(best_iteration=4), False), (dict(iteration=2**53), True), (dict(iteration=2**53 + 1), False), (dict(iteration=-1), False), (dict(iteration=1.), False),
    (dict(prompts_seen=0), True), (dict(prompts_seen=-1), False), (dict(prompts_seen=True), False), (dict(environment={"threads": 1}), True), (dict(environment={"threads": 1024}), True),
    (dict(environment={"threads": 0}), False), (dict(environment={"threads": 1025}), False), (dict(environment=None), False),
    (dict(beta=0.), True), (dict(beta=-1e-9), False), (dict(beta=None), False), (dict(ent_coef=0.), True), (dict(ent_coef=-1e-9), False), (dict(ent_coef=None), False), (dict(best_reward=None), True), (dict(best_reward=-2.), True),
    (dict(best_reward="x"), False), (dict(best_reward=float("nan")), False), (dict(stopped=None), True), (dict(stopped=1), False),
    (dict(score_moments=[0., 0., 0.]), True), (dict(score_moments=(-1., 0., 0.)), False), (dict(score_moments=(2., 0., -1e-9)), False), (dict(score_moments=(2., 0.)), False), (dict(score_moments=(2., float("nan"), 1.)), False), (dict(score_moments=None), False)], ids=str)
def test_numbers_that_a_trainer_can_have_reached(change, fits):
    record = dict(iteration=3, prompts_seen=24, beta=.1, ent_coef=.01, best_reward=1., best_iteration=2, stopped="it was enough", score_moments=(8., .5, 3.), environment={"threads": 2}) | change
    if fits: check_counters(record, {"steps": 5, "lr_schedule": "constant"})
    else:
        with pytest.raises(ValueError, match="must be"): check_counters(record, {"steps": 5, "lr_schedule": "constant"})


@pytest.mark.parametrize("schedule,iteration,fits", [("linear", 5, True), ("linear", 6, False), ("constant", 6, True)])
def test_a_schedule_ends_with_its_steps(schedule, iteration, fits):
    record = dict(iteration=iteration, prompts_seen=24, beta=.1, ent_coef=0., best_reward=None, best_iteration=None, stopped=None, score_moments=[0., 0., 0.], environment={"threads": 2})
    config = {"run.steps": 5, "optimisation.lr_schedule": schedule}  # in groups
    if fits: check_counters(record, config)
    else:
        with pytest.raises(ValueError, match="at most the steps of the schedule, 5"): check_counters(record, config)


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
    monkeypatch.setattr("instruct_goose.runs.run_directory.seen_tokens", lambda trainer, rollout: [])
    stage = SimpleNamespace(after_step=lambda at, of, state: told.append((at, of, state())), saved=None)
    trainer = SimpleNamespace(iteration=2, config=RLHFConfig(steps=7), state=lambda: ({"w": 3}, {"iteration": 2}))
    with unchecked(): RunLog(tmp_path, stage).on_iteration(trainer, None, {"x": float("nan"), "iteration": 1})
    row = {"x": None, "iteration": 1}
    assert told == [(2, 7, ({"w": 3}, {"iteration": 2, "metrics": [row]}))]
    assert json.loads((tmp_path / "metrics.jsonl").read_text("utf-8")) == row


def test_tokenizers_that_cut_a_text_otherwise_are_two():
    one, other = (word_tokenizer(["good", "film"], 20) for _ in range(2))
    assert fingerprint_of_tokenizer(one) == fingerprint_of_tokenizer(other)
    other.backend_tokenizer.normalizer = normalizers.Replace("film", "good")  # the same words, the same special ones
    assert fingerprint_of_tokenizer(one) != fingerprint_of_tokenizer(other)
    plain = [SimpleNamespace(get_vocab=lambda n=n: {"a": n}, special_tokens_map={}) for n in (0, 0, 1)]  # one written in Python
    found = [fingerprint_of_tokenizer(x) for x in plain]
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
