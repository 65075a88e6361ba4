"""What a run tells of itself, when it ends by itself, and how it names what went wrong. The oracles are plain forwards of copied
models, one response at a time, sums done by hand, and scripted judges."""
import copy
import math
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers

import instruct_goose.training.metrics as module
import instruct_goose.training.trainer as trainer_module
from instruct_goose.models.agent import Agent
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.objective.advantages import ADVANTAGES
from instruct_goose.training.checks import require_finite_weights
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.rewards import check_scores
from instruct_goose.training.rollout import Rollout, sample
from instruct_goose.training.trainer import RLHFTrainer

WORDS = [f"w{i}" for i in range(9)]
TOKENIZER = word_tokenizer(WORDS, 20, pad="<end>", bos="<end>", eos="<end>")
EOS = TOKENIZER.eos_token_id
PROMPTS = ["w0 w3", "w5", "", "w1 w1 w2", "w8 w7", "w4", "w2", "w6"]
HELD_OUT = ["w7", "w7 w7", "w7 w8", "w7 w1 w1", "w7 w0", "w7 w6", "w7 w5 w4", "w7 w3", "w7 w2", "w7 w4", "w7 w1"]  # more than a batch


def tiny(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(TOKENIZER), n_embd=16, n_layer=2, n_head=2, n_positions=20,
                                                                 bos_token_id=EOS, eos_token_id=EOS, resid_pdrop=.3, embd_pdrop=.3, attn_pdrop=.3))
    for p in model.parameters(): torch.nn.init.normal_(p, std=.35)
    return model.to(dtype)


def trainer(cls=RLHFTrainer, model=None, **changes):
    settings = dict(device="cpu", batch_size=8, max_new_tokens=6, lr=5e-3, steps=50, seed=1) | changes
    preset = settings.pop("algorithm", "ppo")
    return cls(model or tiny(), config=RLHFConfig.preset(preset, **settings), tokenizer=TOKENIZER)


def reward(texts): return [text.split().count("w1") - .5 * text.split().count("w2") for text in texts]


def ready(t, judge=reward, prompts=PROMPTS): return t.advantages(t.score(t.rollout(prompts), judge))


def no_clock(metrics): return [{k: v for k, v in m.items() if "second" not in k} for m in metrics]


def weights(t): return [p.detach().clone() for p in t.agent.parameters()]


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kl_by_hand(p, q, queries, responses, temperature=1.):
    "Σ over the tokens of each response of Σ_v p log(p/q), each response alone and unpadded through the models' own forward."
    out = []
    for query, response in zip(queries, responses, strict=True):
        ids, at = torch.tensor([query + response]), slice(len(query) - 1, len(query) + len(response) - 1)
        with torch.no_grad(): a, b = (m.eval()(ids).logits[0, at].div(temperature).softmax(-1) for m in (p, q))
        out.append(sum((x * math.log(x / y)) for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)))
    return out


def rows(r): return [[ids[m].tolist() for ids, m in zip(x, y, strict=True)] for x, y in ((r.query_ids, r.query_mask), (r.response_ids, r.mask))]


# ---------------------------------------------------------------- the log

@pytest.mark.parametrize("changes,seen", [(dict(), range(8)), (dict(micro_batch_size=3, temperature=1.4), range(8)),
                                          (dict(batch_size=24), range(0, 24, 3)), (dict(batch_size=80), range(0, 80, 10))], ids=str)
def test_the_exact_distance_that_an_iteration_goes(changes, seen):
    t = trainer(**changes)
    r = ready(t, prompts=(PROMPTS * 10)[:t.config.batch_size])
    assert not r.mask.all()
    old = copy.deepcopy(t.agent.model)
    m = t.optimize(r)
    queries, responses = rows(r)
    exact = kl_by_hand(old, t.agent.model, *([x[i] for i in seen] for x in (queries, responses)), t.config.temperature)
    assert m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6) and m["kl_to_old_exact"] > 1e-3


def test_of_a_large_vocabulary_fewer_responses_are_asked_and_at_last_none(monkeypatch):
    for most, seen in ((6 * 11 * 8, range(8)), (6 * 11 * 3, range(0, 8, 3)), (6 * 11 - 1, None)):
        t = trainer()
        r = ready(t)
        assert r.mask.shape == (8, 6)
        monkeypatch.setattr(module, "MOST", most)
        old, m, (queries, responses) = copy.deepcopy(t.agent.model), t.optimize(r), rows(r)
        if seen is None: assert m["kl_to_old_exact"] is None; continue
        exact = kl_by_hand(old, t.agent.model, *([x[i] for i in seen] for x in (queries, responses)))
        assert m["kl_to_old_exact"] == pytest.approx(sum(exact) / len(exact), rel=1e-6)


def scored(t, scores):
    "A rollout whose scores are set by hand."
    r = t.rollout((PROMPTS * 4)[:len(scores) // t.config.group_size])
    r.scores = torch.tensor(scores, dtype=torch.float64)
    return module.describe(t.advantages(r), t.config)


def test_rewards_of_groups_by_hand():
    scores = [1., 3., 2., 2., 0., 4., 5., 5.]  # std of the pairs, by n − 1: √2, 0, 2√2, 0; by n: 1, 0, 2, 0
    for ddof, std in ((1, 3 * math.sqrt(2) / 4), (0, .75)):
        m = scored(trainer(algorithm="grpo", group_size=2, group_ddof=ddof), scores)
        assert (m["reward_min"], m["reward_max"], m["flat_groups"]) == (0., 5., .5) and m["group_reward_std"] == pytest.approx(std)
    m = scored(trainer(algorithm="rloo", group_size=4), [1., 1., 1., 2., -3., -3., -3., -3.])  # std ½ and 0
    assert (m["reward_min"], m["reward_max"], m["flat_groups"], m["group_reward_std"]) == (-3., 2., .5, pytest.approx(.25))
    assert scored(trainer(algorithm="grpo", group_size=4), [.1] * 8)["flat_groups"] == 1.
    m = scored(trainer(), scores)
    assert m["group_reward_std"] is None and m["flat_groups"] is None and (m["reward_min"], m["reward_max"]) == (0., 5.)


@pytest.mark.parametrize("level,largest", [("token", .9), ("sequence", .25), ("product", .5)])
def test_the_largest_ratio_is_that_of_real_tokens_at_the_level_of_the_loss(level, largest):
    t = trainer(ratio_level=level)
    (q, qm), (ids, mask) = pad([[0, 5], [0], [0, 4]], EOS, side="left"), pad([[3, 4], [5, 6, 2], [7, 8]], EOS, side="right")
    moved = torch.tensor([[.1, .4, 3.], [.9, -.8, .1], [-.2, -.3, 3.]], dtype=torch.float64)  # the threes are padding
    old = torch.full_like(moved, -2.)
    r = Rollout(q, qm, ids, mask, old_logprobs=old, advantages=torch.ones_like(old))
    assert module.describe_step(old + moved, r, t.config)["ratio_max"].item() == pytest.approx(math.exp(largest))
    low = r[[2]]  # all below 1, and the padding is not a token
    expected = {"token": -.2, "sequence": -.25, "product": -.5}[level]
    assert module.describe_step(old[[2]] + moved[[2]], low, t.config)["ratio_max"].item() == pytest.approx(math.exp(expected))


def test_the_largest_ratio_of_an_iteration_is_of_all_its_steps_and_other_meters_are_means():
    t, seen = trainer(epochs=3), []
    update = t.update
    def spy(*args, **kw): seen.append(x := update(*args, **kw)); return dict(x)
    t.update = spy
    m = t.optimize(ready(t))
    assert len(seen) == 6 and m["ratio_max"] == max(x["ratio_max"].item() for x in seen) > 1.01
    assert m["kl_to_old"] == pytest.approx(sum(x["kl_to_old"].item() for x in seen) / 6)


def test_speed_is_tokens_by_seconds(monkeypatch):
    ticks = iter([0., .5, 1., 3., 3., 7., 7., 8., 10., 10.])  # the last step takes no time at all
    t = trainer()
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: next(ticks))
    m = t.step(PROMPTS, reward)
    steps, n = ("rollout", "score", "annotate", "advantages", "optimize"), m["tokens"]
    assert [m[f"seconds_{x}"] for x in steps] == [.5, 2., 4., 1., 0.]
    assert [m[f"tokens_per_second_{x}"] for x in steps] == [n * 2, n / 2, n / 4, n, None]


# ---------------------------------------------------------------- when to stop

def test_a_run_stops_after_the_iteration_whose_kl_is_too_large():
    free = trainer()
    history = free.train(PROMPTS, reward, steps=6, progress=False)
    kl = [m["kl_to_reference"] for m in history]
    limit = kl[2]
    first = next(i for i, x in enumerate(kl) if x > limit)
    assert free.stopped is None and 2 < first < 5
    t, told = trainer(kl_stop=limit), []
    stopped = t.train(PROMPTS, reward, steps=6, callback=lambda m: told.append(m["iteration"]), progress=False)
    assert no_clock(stopped) == no_clock(history[:first + 1]) and told == list(range(first + 1)) and t.iteration == first + 1
    assert t.stopped.startswith(f"iteration {first}: kl_to_reference is {kl[first]:.3g}, above kl_stop")
    t.config.kl_stop = 1e9
    with pytest.raises(TypeError): t.train(PROMPTS, lambda texts: None, steps=1, progress=False)
    assert t.stopped is None  # it is over that the last run was stopped
    assert len(t.train(PROMPTS, reward, steps=2, progress=False)) == 2 and t.stopped is None and t.iteration == first + 3


def test_a_callback_that_stops_is_named():
    t = trainer()
    assert len(t.train(PROMPTS, reward, callback=lambda m: m["iteration"] == 1, progress=False)) == 2
    assert t.stopped == "iteration 1: the callback asked for it"


class Watched(RLHFTrainer):
    "Keeps the rollouts it judges; held-out ones get the next of a script's rewards, if there is one."

    def judge(self, rollout, reward_fn, kind="text"):
        self.__dict__.setdefault("judged", []).append((kind, rollout))
        if kind == "held-out text" and getattr(self, "script", None): return torch.full((len(rollout),), self.script.pop(0))
        return super().judge(rollout, reward_fn, kind)


def test_evaluating_changes_no_bit_of_the_training():
    plain, watched = trainer(), trainer(eval_every=2, keep_best=True)
    state = torch.get_rng_state()
    one = plain.train(PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT)  # without eval_every they are not asked
    two = watched.train(PROMPTS, reward, steps=5, progress=False, held_out=HELD_OUT)
    assert torch.get_rng_state().equal(state) and same(weights(plain), weights(watched)) and watched.stopped is None
    assert plain.sampling.get_state().equal(watched.sampling.get_state()) and plain.shuffling.get_state().equal(watched.shuffling.get_state())
    held = [{k: m.pop(k) for k in list(m) if k.startswith("held_out")} for m in two]
    assert no_clock(one) == no_clock(two) and [sorted(h) for h in held] == [[], ["held_out_kl", "held_out_reward"]] * 2 + [[]]
    assert plain.best is None and watched.best is not None
    assert all(m.training for m in watched.agent.modules())  # dropout is as it was


def test_what_an_evaluation_says_is_so():
    t = trainer(Watched, eval_every=3, seed=4, temperature=1.2)
    history = t.train(PROMPTS, reward, steps=3, progress=False, held_out=HELD_OUT)
    held = [r for kind, r in t.judged if kind == "held-out text"]
    assert [len(r) for r in held] == [8, 3] and [x.split()[0] for r in held for x in r.prompts] == ["w7"] * 11
    texts, dice = [text for r in held for text in r.texts], torch.Generator().manual_seed(4 * 2**20 + 2**20 - 1)
    for part, r in zip((HELD_OUT[:8], HELD_OUT[8:]), held, strict=True):
        response, mask = sample(t.agent, *pad([TOKENIZER(p)["input_ids"] for p in part], EOS, side="left"), 6, EOS, EOS, 1.2, dice)
        assert response.equal(r.response_ids) and mask.equal(r.mask)
    assert history[2]["held_out_reward"] == pytest.approx(sum(reward(texts)) / 11)
    kl = [x for r in held for x in kl_by_hand(t.agent.model, t.ref_model, *rows(r), 1.2)]
    assert history[2]["held_out_kl"] == pytest.approx(sum(kl) / 11, rel=1e-6) and sum(kl) > .01
    again = t.evaluate(HELD_OUT, reward)
    assert again == {k: history[2][k] for k in again}  # the same dice every time
    as_ids = dict(zip(("query_ids", "query_mask"), pad([TOKENIZER(p)["input_ids"] for p in HELD_OUT], EOS, side="left"), strict=True))
    assert t.evaluate(as_ids, reward) == again


def test_the_best_policy_is_kept():
    t, snapshots = trainer(Watched, eval_every=1, keep_best=True, batch_size=16), []
    t.script = [1., 5., 3., 5.]  # the first of equals stays
    t.train(PROMPTS, reward, steps=4, progress=False, held_out=HELD_OUT[:8],
            callback=lambda m: snapshots.append({k: x.clone() for k, x in t.agent.model.state_dict().items()}))
    assert t.best_reward == 5. and all(x.device.type == "cpu" for x in t.best.values())
    is_ = lambda i: all(t.best[k].equal(x) for k, x in snapshots[i].items()) and t.best.keys() == snapshots[i].keys()
    assert [is_(i) for i in range(4)] == [False, True, False, False]
    fresh = tiny(seed=3)
    fresh.load_state_dict(t.best)
    value = t.agent.value_head.weight.clone()
    t.load_best()
    ids = torch.tensor([[0, 3, 4]])
    assert t.agent.model.eval()(ids).logits.equal(fresh.eval()(ids).logits) and t.agent.value_head.weight.equal(value)
    kept = {k: x.clone() for k, x in t.best.items()}
    t.step(PROMPTS, reward)
    assert all(t.best[k].equal(x) for k, x in kept.items()) and not all(x.equal(kept[k]) for k, x in t.agent.model.state_dict().items())


def test_stopping_and_evaluating_refuse(unchecked):
    asked = []
    def judge(texts): asked.append(texts); return reward(texts)
    with unchecked():
        with pytest.raises(ValueError, match="eval_every is 2, but there is nothing to evaluate on: pass held_out="): trainer(eval_every=2).train(PROMPTS, judge, progress=False)
        with pytest.raises(ValueError, match="no prompts"): trainer(eval_every=2).train(PROMPTS, judge, progress=False, held_out=[])
        with pytest.raises(ValueError, match="the limit is 14"): trainer(eval_every=2).train(PROMPTS, judge, progress=False, held_out=["w1 " * 16])
        with pytest.raises(ValueError, match="no policy has been kept: set keep_best"): trainer().load_best()
        with pytest.raises(ValueError, match="eval_every is None: it must be a number of iterations, at most steps, with keep_best"): RLHFConfig(keep_best=True)
        for bad in (dict(kl_stop=0.), dict(reward_timeout=0), dict(eval_every=0), dict(keep_best=3)):
            with pytest.raises(ValueError, match="must be"): RLHFConfig(**bad)
        with pytest.raises(TypeError, match="whole number"): RLHFConfig(eval_every=1.5)
    assert not asked  # all of it before any work


# ---------------------------------------------------------------- what is not finite

def spoiled(name, value=float("nan")): return lambda t: dict(t.agent.named_parameters())[name].data.view(-1)[3:4].fill_(value)
def poison_reference(t): t.ref_model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("inf")
def endless_price(t):
    annotate = t.annotate
    def broken(r): annotate(r).ref_logprobs[0, 0] = float("-inf"); return r
    t.annotate = broken


def bad_advantages(t):
    estimate = ADVANTAGES["gae"].estimate
    def broken(*args, **kw): a, R = estimate(*args, **kw); a[2, 1] = float("nan"); return a, R
    ADVANTAGES["spoiled"] = ADVANTAGES["gae"]._replace(estimate=broken)
    t.config.advantage, t.config.whiten_advantages = "spoiled", False


def bad_loss(t):
    optimize = t.optimize
    def broken(r):
        assert not r.mask.all()
        r.advantages[5, 0], t.bad = float("inf"), r.texts[5]
        r.old_logprobs = torch.where(r.mask, r.old_logprobs, float("nan"))  # which is allowed
        return optimize(r)
    t.optimize, t.config.minibatches = broken, 1


def bad_gradient(t): t.agent.model.transformer.h[0].attn.c_proj.weight.register_hook(lambda g: g * float("nan"))


STAGES = {  # what is broken, and what the message must say
    "rollout logits": (spoiled("model.transformer.ln_f.bias"), "the model's logits are NaN or infinite in rows .0, 1.*the weight model.transformer.ln_f.bias is not finite"),
    "values": (spoiled("value_head.weight", float("inf")), "values is (nan|-?inf) at token 0 of response 0 of the rollout, 'w.*the weight value_head.weight"),
    "reference": (poison_reference, "ref_logprobs is nan at token 0 of response 0 of the rollout, .*the reference's weight transformer.h.1.mlp.c_fc.weight"),
    "rewards": (endless_price, "rewards is (nan|-?inf) at token 0 of response 0 of the rollout, .*weights and gradients are finite: look at rewards and values"),
    "advantages": (bad_advantages, "advantages is nan at token 1 of response 2 of the rollout, '"),
    "loss": (bad_loss, "the loss is (nan|-?inf) and advantages is inf at token 0 of response . of the minibatch, '"),
    "gradient": (bad_gradient, "grad_norm is nan; the gradient of model.transformer.h.0.attn.c_proj.weight is not finite"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_number_that_is_not_finite_stops_the_run_before_the_weights_move(stage, monkeypatch):
    spoil, message = STAGES[stage]
    monkeypatch.setitem(ADVANTAGES, "spoiled", ADVANTAGES["gae"])  # and taken out again
    t = trainer()
    t.train(PROMPTS, reward, steps=2, progress=False)
    spoil(t)
    before, moments = weights(t), copy.deepcopy(t.optimizer.state_dict()["state"])
    with pytest.raises(FloatingPointError, match=f"iteration 2: {message}") as e: t.step(PROMPTS, reward)
    assert "The optimizer has not moved" in str(e.value) and t.iteration == 2
    if stage == "loss": assert repr(t.bad) in str(e.value)  # the minibatch is shuffled, the text is the one
    assert same([w.nan_to_num() for w in weights(t)], [w.nan_to_num() for w in before])
    for i, state in t.optimizer.state_dict()["state"].items():
        for k, x in state.items(): assert torch.equal(x, moments[i][k])


def test_a_weight_that_the_last_step_has_blown_up_is_found_in_the_same_iteration():
    class Blows(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure); self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 4: self.param_groups[0]["params"][2].data[1] = float("-inf")
    t = trainer()
    name = next(n for n, p in t.agent.named_parameters() if p is t.optimizer.param_groups[0]["params"][2])
    t.optimizer = Blows(t.optimizer.param_groups)
    with pytest.raises(FloatingPointError, match=f"iteration 0: the optimizer has made a weight infinite or NaN; the weight {name} is not finite. Go back to the last checkpoint"):
        t.step(PROMPTS, reward)
    assert t.iteration == 0 and t.optimizer.taken == 4


def test_huge_weights_are_not_taken_for_infinite_ones():
    t = trainer(model=Agent(tiny(dtype=torch.float32)))
    t.agent.value_head.weight.data.fill_(1e30)  # its square is infinite in float32
    require_finite_weights(t.agent)


def test_scores_set_by_hand_are_checked_and_padding_is_not(poison):
    t = trainer()
    r = t.annotate(t.rollout(PROMPTS))
    r.scores = torch.tensor([0.] * 6 + [float("nan"), 0.])
    with pytest.raises(FloatingPointError, match="iteration 0: scores is nan at response 6 of the rollout, 'w2"): t.advantages(r)
    r.scores = torch.ones(8)
    for name in ("old_logprobs", "ref_logprobs", "values"): setattr(r, name, poison(getattr(r, name), r.mask))
    m = t.optimize(t.advantages(r))
    assert all(math.isfinite(m[k]) for k in ("ratio_max", "kl_to_old_exact", "policy_loss"))


# ---------------------------------------------------------------- reward functions

class Fails(ArithmeticError): pass


def failing(bad, calls=None, error=Fails):
    "Raises for every batch that holds a text of `bad`."
    def judge(texts):
        if calls is not None: calls.append(list(texts))
        for text in texts:
            if text in bad: raise error(f"cannot read {text}")
        return [0.] * len(texts)
    return judge


def test_errors_of_generators_and_of_objects_with_a_score_method_are_theirs():
    t = trainer()
    r = t.rollout(PROMPTS)
    class Judge:
        def score(self, texts): return (1 / (text != r.texts[4]) for text in texts)
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError.*for 8 texts") as e: t.score(r, Judge())
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("seconds", [None, 5.])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_nobodys_mistake(interrupt, seconds):
    t, calls = trainer(reward_timeout=seconds), []
    r = t.rollout(PROMPTS)
    with pytest.raises(interrupt): t.score(r, failing(set(r.texts), calls, interrupt))
    assert len(calls) == 1
    def judge(texts): # first an error, and then the user has had enough
        calls.append(texts)
        raise Fails if len(texts) == 8 else interrupt
    with pytest.raises(interrupt): t.score(r, judge)


def test_a_function_that_hangs_is_left_behind():
    t, release, ended = trainer(reward_timeout=.1), threading.Event(), threading.Event()
    r = t.rollout(PROMPTS)
    t.iteration = 6
    def hangs(texts): release.wait(20); ended.set(); return [0.] * len(texts)
    try:
        with pytest.raises(TimeoutError, match="iteration 6: no answer from the reward function within reward_timeout, 0.1 seconds, for 8 texts, 'w0 w3") as e: t.score(r, hangs)
        assert all(repr(x) in str(e.value) for x in r.texts[:3]) and r.scores is None and not ended.is_set()
        thread = next(x for x in threading.enumerate() if x.name == "reward function")
        assert thread.daemon  # the process may end without it
        assert t.score(r, reward).scores.tolist() == reward(r.texts)  # and the trainer goes on
        r.scores = None
    finally: release.set()
    thread.join(20)
    assert ended.is_set() and r.scores is None  # what it says too late is thrown away
    def late(texts):
        def one_by_one():
            for _ in texts: yield threading.Event().wait(.5)
        return one_by_one()
    with pytest.raises(TimeoutError, match="no answer"): t.score(r, late)


def test_a_timeout_of_the_functions_own_is_an_error_like_others():
    t = trainer(reward_timeout=5.)
    def judge(texts): raise TimeoutError("the service does not answer")
    with pytest.raises(RuntimeError, match="raised TimeoutError.*the service does not answer") as e: t.score(t.rollout(PROMPTS), judge)
    assert type(e.value.__cause__) is TimeoutError


def test_a_timeout_that_is_not_reached_changes_nothing():
    runs = []
    for seconds in (None, 1e300):
        t = trainer(reward_timeout=seconds)
        runs.append((no_clock(t.train(PROMPTS, reward, steps=2, progress=False)), weights(t)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])



# ── the line that tells how far a run is ──

def test_what_is_unknown_is_left_out():
    m = {"reward_mean": 1.234, "held_out_reward": None, "kl_to_reference": 2., "entropy": .5, "tokens": 900, "seconds_rollout": .5, "seconds_score": None, "seconds_optimize": .25}
    assert module.in_short(m) == "reward 1.23, KL 2.00, entropy 0.50, 1,200 tokens/s"
    assert module.in_short(m | {"clip_fraction": .25, "held_out_reward": 3.}) == "reward 1.23, held out 3.00, KL 2.00, entropy 0.50, clipped 25%, 1,200 tokens/s"
    assert module.in_short({"reward_mean": None}) == ""


def test_a_run_tells_its_iterations(capsys):
    trainer().train(PROMPTS, reward, steps=2)
    said = capsys.readouterr()
    assert said.out == "" and "ppo: 100%" in said.err and "2/2" in said.err and "tokens/s" in said.err


class Odd:
    def __float__(self): raise MemoryError
    def __repr__(self): raise MemoryError


GARBAGE = {
    "nothing": (None, TypeError, "returned a NoneType for 8 texts, the first of them 'w0 w3"), "a text": ("12345678", TypeError, "a str"), "bytes": (b"12345678", TypeError, "a bytes"),
    "a number": (1., TypeError, "a float"), "a dictionary": ({}, TypeError, "a dict"), "a set": (set(range(8)), TypeError, "a set"), "frozen": (frozenset(range(8)), TypeError, "a frozenset"),
    "too few": ([0.] * 7, ValueError, "7 scores for 8 texts; the first without a score is text 7 of 8, 'w6.*, for the prompt 'w6'"), "too many": ([0.] * 9, ValueError, "9 scores for 8"),
    "endless": (iter(int, 1), ValueError, "9 scores for 8"), "none": ([0.] * 3 + [None] + [0.] * 4, TypeError, "text 3 of 8, 'w1 w1 w2.*, for the prompt 'w1 w1 w2' is None, which says that the function does not apply.*a list of functions"),
    "texts": ([0.] * 5 + ["1"] + [0.] * 2, TypeError, "text 5 of 8, 'w4.*, for the prompt 'w4' is '1': not"), "byte": ([b"1"] * 8, TypeError, "text 0 of 8"),
    "complex": ([0., 1j] * 4, TypeError, "text 1 of 8, 'w5.* is 1j"), "complex array": (np.array([0, 1j] * 4), TypeError, "text 0 of 8, 'w0 w3.* is 0j"),
    "complex numbers of numpy": ([np.complex64(1j)] * 8, TypeError, "not a number"), "complex tensor": (torch.zeros(8, dtype=torch.complex64), TypeError, "is 0j"),
    "nested": ([[0.]] * 8, ValueError, r"text 0 of 8, .* got a list of 1 numbers.*one number for each"), "table": (np.zeros((8, 1)), ValueError, r"shape \(8, 1\)"), "pairs": ([torch.zeros(2)] * 8, ValueError, "text 0.*got a list of 2 numbers"),
    "nan": ([0.] * 6 + [float("nan"), 0.], ValueError, "the score of text 6 of 8, 'w2.*, for the prompt 'w2' is nan"), "infinite": ([float("-inf")] + [0.] * 7, ValueError, "is -inf"),
    "beyond float32": ([1e300] * 8, ValueError, "is inf"), "beyond float": ([10**400] * 8, ValueError, "is inf"), "odd": ([Odd()] * 8, TypeError, "is a Odd: not a number"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_named_with_iteration_text_and_prompt(kind, unchecked):
    answer, error, message = GARBAGE[kind]
    t = trainer()
    t.iteration = 9
    r = t.rollout(PROMPTS)
    with unchecked(), pytest.raises(error, match=f"^iteration 9: .*{message}"): t.score(r, lambda texts: answer)
    assert r.scores is None


anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=3) | st.binary(max_size=3) | st.fractions() | st.dates(),
                        lambda x: st.lists(x, max_size=4) | st.tuples(x) | st.dictionaries(st.text(max_size=2), x, max_size=2) | st.lists(x, max_size=4).map(iter), max_leaves=6)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(anything)
def test_whatever_is_returned_becomes_finite_numbers_or_a_clear_error(answer):
    try: scores = check_scores.__wrapped__(answer, ["a", "b"]) if hasattr(check_scores, "__wrapped__") else check_scores(answer, ["a", "b"])
    except (ValueError, TypeError) as e: assert "the reward function returned" in str(e) or "the score of text" in str(e)
    else: assert scores.shape == (2,) and scores.dtype == torch.float32 and scores.isfinite().all()
