"""The library on a GPU that is not there (see pretend.py): whatever mixes devices, or sends data across without an explicit
`.to`, fails with its line. The kernels are the CPU's own, so the figures must be the CPU's too."""

import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from deep import first
from device.pretend import DeviceError, PretendGPU

from instruct_goose.config import RLHFConfig
from instruct_goose.core import processes
from instruct_goose.core.state import flatten, unflatten
from instruct_goose.core.tensor_checks import deferred_checks, refuse_if
from instruct_goose.models import sampling
from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.models.decoding import (
    GraphSteps,
    LibrarySteps,
    OwnSteps,
    StaticSteps,
    has_own_steps,
    product_rounding,
    start_decoding,
)
from instruct_goose.models.response import response_logits, response_logprobs
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.objective.group import PRESETS
from instruct_goose.rollouts.evaluation import best_of_n, generate, kl_to_reference
from instruct_goose.rollouts.rollout import finished
from instruct_goose.rollouts.sampler import StopStrings
from instruct_goose.runs.checkpoints import load_checkpoint, save_checkpoint
from instruct_goose.supervised.reward_model_training import pair_accuracy, train_reward_model
from instruct_goose.supervised.sft import lm_nats, train_lm
from instruct_goose.training.trainer import RLHFTrainer

WORDS = [f"w{i}" for i in range(9)]
TOKENIZER = word_tokenizer(WORDS, 24, pad="<end>", bos="<end>", eos="<end>")
EOS = TOKENIZER.eos_token_id
BASE = dict(
    vocab_size=len(TOKENIZER),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=24,
    pad_token_id=EOS,
    bos_token_id=EOS,
    eos_token_id=EOS,
)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE),
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "gemma2": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8),
}  # whose head is not plain: it caps its logits


def shared(kind, **more):
    return lambda: getattr(transformers, f"{kind}Config")(**ROTARY | more)


FAMILIES = CONFIGS | {
    "qwen2": shared("Qwen2"),
    "qwen3": shared("Qwen3", head_dim=8),
    "mistral": shared("Mistral", sliding_window=None),
    "phi": shared("Phi"),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**BASE, intermediate_size=24),
    "opt": lambda: transformers.OPTConfig(**BASE, ffn_dim=24, word_embed_proj_dim=16),
    "mistral, window": shared("Mistral", sliding_window=6),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, n_layer=1, n_head=2
    ),
}
STEPS = dict.fromkeys(FAMILIES, StaticSteps) | {
    "gpt2": OwnSteps,
    "llama": OwnSteps,
    "mistral, window": LibrarySteps,
    "bloom": LibrarySteps,
}  # on a GPU
PROMPTS = ["w1 w2", "", "w3", "w4 w5 w6", "w1", "w7 w8", "w2", "w5"]  # of different lengths: padded
TEXTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w1 w2", "w3", "w5 w5 w6", "w8 w2", "w1 w1", "w7"]
PAIRS = [{"chosen": a, "rejected": b} for a, b in zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)]


def reward(texts):
    return [float(len(t)) + t.count("w1") for t in texts]


@pytest.fixture
def gpu():
    with PretendGPU():
        yield


def tiny(kind="gpt2", seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[kind]()).eval()


def config(name="ppo", **changes):
    size = {"group_size": 2} if PRESETS[name]["group_size"] > 1 else {}
    return RLHFConfig.preset(
        name,
        **{
            "batch_size": 8,
            "max_new_tokens": 5,
            "lr": 1e-3,
            "steps": 2,
            "epochs": 2,
            "minibatches": 2,
        }
        | size
        | changes,
    )


def on_gpu(*things):
    "All weights of modules, all tensors; None is nowhere."
    tensors = []
    for x in things:
        if torch.is_tensor(x):
            tensors.append(x)
        elif x is not None:
            tensors += [*x.parameters(), *x.buffers()]
    return bool(tensors) and {t.device.type for t in tensors} == {"cuda"}


def same(a, b):
    "Two logs, but for what the clock says."
    return all(
        (x is None and b[k] is None) or math.isclose(x, b[k], rel_tol=1e-4, abs_tol=1e-5)
        for k, x in a.items()
        if "second" not in k
    )


def run(kind, settings, value_model=None, device="cuda", n=2):
    trainer = RLHFTrainer(
        Agent(tiny(kind), value_model=value_model),
        None,
        settings(device=device),
        tokenizer=TOKENIZER,
    )
    return trainer, [
        trainer.step(PROMPTS[: 8 // trainer.config.group_size], reward) for _ in range(n)
    ]


@pytest.mark.parametrize("kind", first(1, ["gpt2", "llama"]))
@pytest.mark.parametrize("name", PRESETS)
def test_presets(name, kind):
    def make(**device):
        return config(name, **device)

    _, there = run(kind, make, device="cpu", n=1)
    with PretendGPU():
        trainer, here = run(kind, make, n=1)
        assert on_gpu(trainer.agent, trainer.ref_model)
    assert all(map(same, here, there))


ENDS = {
    "rows end one by one": ([EOS, 1, 2], 18),
    "most end at once": ([EOS, *range(1, 7)], 18),
    "some end": ([EOS, 1], 18),
    "nothing ends": (None, 18),
    "short": ([EOS], 3),
}


@pytest.mark.parametrize(
    "kind, ends",
    [
        *((kind, ends) for kind in ("llama", "gemma2") for ends in ENDS),
        *((kind, "some end") for kind in STEPS if kind not in CONFIGS),
    ],
)
def test_the_gpu_samples_what_the_cpu_samples(kind, ends, monkeypatch):
    "The CPU asks after each token who has ended, and its keys and values grow; the GPU every few tokens, over the whole room."
    monkeypatch.setattr(sampling, "CHECK_EVERY", 4)
    steps, left = [], []

    def begun(*args, **kwargs):
        logits, step = start_decoding(*args, **kwargs)
        steps.append(step)
        keep, step.keep = step.keep, lambda order: (left.append(step), keep(order))
        return logits, step

    monkeypatch.setattr(sampling, "start_decoding", begun)
    eos, n = ENDS[ends]
    ids, mask = pad([TOKENIZER(p)["input_ids"] or [EOS] for p in PROMPTS * 2], EOS, side="left")

    def written(place):
        dice = torch.Generator().manual_seed(5)
        out = sample(model.to(place), ids, mask, n, eos, EOS, 0.9, dice, with_logprobs=True)
        states.append(dice.get_state())
        return out

    model = tiny(kind)
    states = []
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    slow = written("cpu")
    with PretendGPU():
        fast = [x.cpu() for x in written("cuda")]
    assert torch.equal(slow[0], fast[0]) and torch.equal(slow[1], fast[1])
    torch.testing.assert_close(slow[2], fast[2], atol=1e-5, rtol=1e-5)
    assert type(getattr(steps[1], "step", steps[1])) is STEPS[kind]
    if eos is None:
        assert torch.equal(*states)  # as many random numbers as tokens: the next call goes on alike
    if ends == "some end":
        assert steps[1] in left
    if ends == "rows end one by one":
        assert len(set(slow[1].sum(-1).tolist())) > 5


@pytest.mark.parametrize("n", [3, 8, 18])
def test_a_stop_string_ends_where_it_ends_on_the_cpu(n, monkeypatch):
    "The GPU's tokens are read every four: what was written behind the text, or behind an end token, is taken out."
    monkeypatch.setattr(sampling, "CHECK_EVERY", 4)
    model = tiny("llama")
    stops = StopStrings(["w1 w2", "w3", "w7 w7"], TOKENIZER)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids, mask = pad([TOKENIZER(p)["input_ids"] or [EOS] for p in PROMPTS * 3], EOS, side="left")

    def written(place):
        watch = stops.watch([[] for _ in ids])
        return sample(
            model.to(place),
            ids,
            mask,
            n,
            [EOS],
            EOS,
            0.9,
            torch.Generator().manual_seed(3),
            with_logprobs=True,
            stops=watch,
        )

    slow = written("cpu")
    with PretendGPU() as waits:
        fast = [x.cpu() for x in written("cuda")]
    assert torch.equal(slow[0], fast[0]) and torch.equal(slow[1], fast[1])
    torch.testing.assert_close(slow[2], fast[2], atol=1e-5, rtol=1e-5)
    ends = {TOKENIZER.decode(row[own]).split()[-1] for row, own in zip(*slow[:2], strict=True)}
    assert len(set(slow[1].sum(-1).tolist())) > 2 and "w3" in ends and waits.total() < 40


def test_the_faster_step_may_differ_by_the_rounding_of_tf32(gpu):
    "On a card a step's logits were 1e-3 from the model's with TF32: its products keep 10 bits."
    logits = torch.zeros(2, 3, device="cuda")
    assert product_rounding(logits) == torch.finfo(torch.float32).eps
    torch.set_float32_matmul_precision("high")
    try:
        assert product_rounding(logits) == 2.0**-10
        assert product_rounding(logits.to(torch.bfloat16)) == 2.0**-7
        assert product_rounding(logits.cpu()) == torch.finfo(torch.float32).eps
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_checkpointing_hooks_into_a_model_does_not_slow_sampling():
    "transformers marks the embedded tokens for gradients: no number changes. Another hook may change one."
    agent = Agent(tiny("llama"), gradient_checkpointing=True)
    assert has_own_steps(agent.model)
    agent.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert not has_own_steps(agent.model)


@pytest.mark.parametrize("kind", [kind for kind in STEPS if STEPS[kind] is not LibrarySteps])
def test_sampling_does_not_wait_for_the_gpu_at_each_token(kind):
    "Of sixteen tokens: how many rows go on comes back."
    ids = torch.tensor([[3, 4], [5, 6]])

    def waits(n):
        with PretendGPU() as waits:
            sample(
                tiny(kind).cuda(),
                ids,
                torch.ones_like(ids).bool(),
                n,
                None,
                EOS,
                generator=torch.Generator(),
            )
        return waits.total()

    assert waits(22) - waits(6) == 1 and waits(15) == waits(6)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("ppo", {"ent_coef": 0.01}),
        ("grpo", {"mask_truncated": True, "max_kl_to_old": 99.0}),
        ("gspo", {}),
        ("dapo", {"importance_cap": 2.0}),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_update_waits_for_the_gpu_at_most_three_times_a_step(name, kind, changes):
    "Whether a pass needs a mask, whether all is finite, and, where that ends an iteration, how far the policy has gone."

    def waits(**sizes):
        with PretendGPU() as waits:
            trainer = RLHFTrainer(
                tiny(kind),
                None,
                config(name, device="cuda", **sizes | changes),
                tokenizer=TOKENIZER,
            )
            r = trainer.score(trainer.rollout(PROMPTS[: 8 // trainer.config.group_size]), reward)
            r.ended = torch.arange(8, device="cuda") != 5
            r = trainer.advantages(r)
            waits.clear()
            with trainer.phases():
                trainer.optimize(r)
            return waits.total()

    two, four, pieces = (
        waits(minibatches=n, epochs=1, **micro)
        for n, micro in ((2, {}), (4, {}), (4, {"micro_batch_size": 1}))
    )
    assert four - two == 2 * (2 + ("max_kl_to_old" in changes))  # two steps more
    assert (
        pieces - four <= 8 + 2 * 8
    )  # a pass for each of eight rows, not of four minibatches; and those that measure how far all went
    assert two < 20


@pytest.mark.parametrize(
    "column, kind",
    [("advantages", "advantages"), ("returns", "returns"), ("old_logprobs", "old_logprobs")],
)
def test_what_is_not_finite_is_refused_before_a_weight_moves(gpu, column, kind):
    "Checks are read at the end of a step: the error still says what, where and in which iteration."
    trainer = RLHFTrainer(tiny(), None, config(device="cuda", minibatches=1), tokenizer=TOKENIZER)
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS), reward))
    getattr(r, column)[2, 0] = math.nan
    before = [p.clone() for p in trainer.agent.parameters()]
    with pytest.raises(
        FloatingPointError, match=f"iteration 0: {kind} is nan at token 0 of response .*"
    ):
        with trainer.phases():
            trainer.optimize(r)
    assert all(map(torch.equal, before, trainer.agent.parameters()))


def test_checks_on_a_gpu_are_read_together():
    wrong, right = torch.tensor([True, False]).to("cpu")

    def calls(text):
        return lambda: calls.said.append(text) or ValueError(text)

    calls.said = []
    with PretendGPU() as waits:
        no, yes = (torch.tensor(x, device="cuda") for x in (False, True))
        with deferred_checks():
            for _ in range(5):
                refuse_if(no, calls("never"))
            with pytest.raises(KeyError), deferred_checks():
                refuse_if(yes, calls("the other error comes first"))
                raise KeyError
            with deferred_checks():
                refuse_if(no, calls("never"))
            refuse_if(no, calls("never"))
            assert waits.total() == 1  # the inner block's
        assert waits.total() == 2
        with pytest.raises(ValueError, match="^inner$"), deferred_checks():
            refuse_if(yes, calls("outer"))
            with deferred_checks():
                refuse_if(no, calls("never"))
                refuse_if(yes, calls("inner"))
                refuse_if(yes, calls("second"))
        with pytest.raises(ValueError, match="^on the CPU$"), deferred_checks():
            refuse_if(yes, calls("outer"))
            refuse_if(wrong, calls("on the CPU"))
        with pytest.raises(ValueError, match="^at once$"):
            refuse_if(yes, calls("at once"))
    assert calls.said == ["inner", "on the CPU", "at once"] and not right


def test_what_a_gpu_refuses_in_one_process_is_told_to_the_others(gpu, monkeypatch):
    told = []
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(
        processes, "all_gather_object", lambda x: told.append(x) or [x, (None, None)]
    )

    def work():
        refuse_if(torch.tensor(True, device="cuda"), lambda: FloatingPointError("the loss is nan"))
        return 3

    with deferred_checks(), pytest.raises(FloatingPointError):
        processes.run_and_gather(work)
    assert told[0][1] == "FloatingPointError: the loss is nan"


def test_ids_and_masks_of_a_rollout_are_kept_on_the_cpu(gpu):
    "By index, in joined parts, after a change by hand and a move: what is read there is what the GPU has."
    trainer = RLHFTrainer(tiny(), None, config(device="cuda"), tokenizer=TOKENIZER)
    r = trainer.rollout(PROMPTS)

    def same(r):
        own = r.on_host
        there = vars(r)
        assert not own.mask.is_cuda and own is not r
        return all(
            torch.equal(vars(own)[name], there[name].cpu())
            for name in ("query_ids", "query_mask", "response_ids", "mask")
        )

    assert same(r) and same(r[[3, 1]]) and same(r[torch.tensor([2, 0])]) and same(r[1:4][[2]])
    assert torch.equal(r.at_sampled(r.response_ids), r.response_ids[r.mask])
    r.mask[0, 1:] = False
    r = trainer.score(r, reward)
    trainer.advantages(r)
    r.mask[2, 1:] = False
    experience = trainer.advantages(r)
    assert same(r) and same(experience)
    experience.mask[2:4, 1:] = False
    trainer.optimize(experience)
    assert same(experience)
    assert r.to_("cpu").host_copy is None and not r.mask.is_cuda and r.on_host is r


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_half_precision_the_gpus_step_is_our_own(gpu, kind):
    model = tiny(kind).to("cuda", torch.bfloat16)
    ids = torch.tensor([[0, 3, 4], [0, 5, 6]]).cuda()
    mask = torch.ones(2, 3).bool().cuda()
    (_, ours), (_, theirs) = (
        start_decoding(model, ids, mask, 2, graph=True),
        start_decoding(hooked(model), ids, mask, 2, graph=True),
    )
    assert type(ours) is GraphSteps and type(theirs) is LibrarySteps
    for token in torch.tensor([[7, 2], [1, 9]]).cuda():
        torch.testing.assert_close(ours(token), theirs(token), atol=16 * 2.0**-8, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_under_autocast_the_gpus_step_has_fixed_shapes(gpu, kind):
    "The kernels are the CPU's, which have an autocast of their own."
    model = tiny(kind).cuda()
    ids = torch.tensor([[0, 3, 4], [0, 5, 6]]).cuda()
    mask = torch.ones(2, 3).bool().cuda()
    with torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        (_, graph), (_, theirs) = (
            start_decoding(model, ids, mask, 2, graph=True),
            start_decoding(hooked(model), ids, mask, 2, graph=True),
        )
        assert type(graph.step) is STEPS[kind] and type(theirs) is LibrarySteps
        for token in torch.tensor([[7, 2], [1, 9]]).cuda():
            torch.testing.assert_close(graph(token), theirs(token), atol=16 * 2.0**-8, rtol=0)


def test_a_step_that_cannot_be_captured_runs_without_a_graph(gpu):
    model = tiny("llama").cuda()
    ids = torch.tensor([[0, 3, 4], [0, 5, 6]]).cuda()
    mask = torch.ones(2, 3).bool().cuda()
    (_, plain), (_, graph) = (start_decoding(model, ids, mask, 3, graph=True) for _ in range(2))
    token = torch.tensor([7, 2]).cuda()
    seen = [graph(token).clone(), graph(token).clone()]
    assert graph.graph is not None and torch.equal(graph.token, token)
    graph.keep(torch.tensor([1]).cuda())
    graph(token[1:])
    assert graph.graph is None  # a new number of rows is met without one

    def capture(self, token):
        raise RuntimeError("operation not permitted when stream is capturing")

    # ends within the pretended GPU, which has a capture of its own: monkeypatch would bring it back
    with (
        patch.object(GraphSteps, "capture", capture),
        pytest.warns(
            UserWarning, match="no CUDA graph of the sampler's step.*not permitted"
        ) as warned,
    ):
        said = [plain(token), plain(token)]
    assert len(warned) == 1 and plain.graph is None and all(map(torch.equal, said, seen))


def hooked(model):
    "One that our own step does not read."
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "kind, value_model, changes",
    [
        (
            "gemma2",
            None,
            {"micro_batch_size": 3, "ent_coef": 0.01, "temperature": 0.7, "kl_target": 1.0},
        ),
        ("llama", "copy", {"importance_cap": 2.0, "dual_clip": 3.0}),
        *first(
            1,
            [
                (
                    "gpt2",
                    None,
                    {"kl_placement": "loss", "kl_gradient": "ratio", "weight_decay": 0.1},
                ),
                ("gpt2", None, {"kl_placement": "loss", "kl_gradient": "straight_through"}),
                ("gpt2", None, {"advantage": "return", "beta": 0.0}),
                ("gpt2", None, {"advantage": "greedy", "micro_batch_size": 3, "device": "auto"}),
            ],
        ),
    ],
    ids=str,
)
def test_settings(gpu, kind, value_model, changes):
    trainer, _ = run(kind, lambda device: config(**{"device": device} | changes), value_model)
    assert on_gpu(trainer.agent, trainer.ref_model)


@pytest.mark.parametrize("device, set_to", [("cuda", "high"), ("cpu", "highest")])
def test_tf32_is_a_setting_of_a_gpu(gpu, device, set_to):
    try:
        RLHFTrainer(tiny(), None, config(device=device, tf32=True), tokenizer=TOKENIZER)
        assert torch.get_float32_matmul_precision() == set_to
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_rollout_from_elsewhere(gpu):
    "Made by hand, or read from a file, it lies on the CPU: it is moved, with all that it holds."
    trainer = RLHFTrainer(tiny(), None, config(device="cuda"), tokenizer=TOKENIZER)
    some = [reward, lambda texts: [None, *reward(texts)[1:]]]
    r = trainer.score(trainer.rollout(PROMPTS), some).to_("cpu")
    experience = trainer.advantages(r).to_("cpu")
    trainer.optimize(experience)
    columns = [*vars(experience).values(), *experience.score_parts.values()]
    assert on_gpu(*filter(torch.is_tensor, columns))


MISTAKES = {
    "a reference left behind": lambda t: t.ref_model.cpu(),
    "a value head left behind": lambda t: t.agent.value_head.cpu(),
    "half the policy": lambda t: t.agent.model.transformer.h[0].mlp.cpu(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_with_its_line(gpu, mistake):
    "So that the silence of the other tests means something."
    trainer = RLHFTrainer(tiny(), None, config(device="cuda"), tokenizer=TOKENIZER)
    MISTAKES[mistake](trainer)
    with pytest.raises((DeviceError, RuntimeError), match=r"same device.* at \w+\.py:\d+: "):
        trainer.step(PROMPTS, reward)


@pytest.mark.parametrize("kind", CONFIGS)
def test_agent(gpu, kind, tmp_path):
    agent = Agent(tiny(kind), value_model="copy").cuda()
    mask = torch.ones(2, 3, dtype=torch.bool, device="cuda")
    ids = torch.tensor([[0, 3, 4], [0, 5, 6]], device="cuda")
    now = agent.evaluate(ids, mask, ids, mask)
    (now.logprobs.sum() + now.values.sum() + now.entropy.sum()).backward()
    assert on_gpu(
        *now, *agent(ids, mask), agent.values(ids, mask, ids, mask), create_reference_model(agent)
    )
    assert on_gpu(
        response_logprobs(agent.model, ids, mask, ids, mask),
        response_logits(agent.model, ids, mask, ids, mask),
    )
    r = generate(agent.model, TOKENIZER, [p for p in PROMPTS for _ in range(2)], 5, batch_size=6)
    best, _ = best_of_n(r, reward(r.texts), 2)
    assert on_gpu(
        best.response_ids,
        finished(best, EOS),
        kl_to_reference(agent.model, tiny(kind, seed=1).cuda(), best, batch_size=3),
    )
    agent.save_pretrained(tmp_path)
    assert on_gpu(Agent.from_pretrained(tmp_path).cuda())
    torch.testing.assert_close(
        agent.evaluate(ids.cpu(), mask.cpu(), ids, mask).logprobs, now.logprobs
    )  # laid out on the CPU, from anywhere


def test_reward_model(gpu, tmp_path):
    model = RewardModel.from_causal_lm(tiny("llama").cuda(), TOKENIZER)
    assert on_gpu(model)
    train_reward_model(model, PAIRS, steps=3, lr=1e-3, batch_size=4, progress=False)
    model.normalise(TEXTS)
    scores = model.score(TEXTS)
    assert abs(sum(scores)) < 1e-4 and 0 <= pair_accuracy(model.score, PAIRS) <= 1
    model.save_pretrained(tmp_path)
    assert RewardModel.from_pretrained(tmp_path).to("cuda").score(TEXTS) == pytest.approx(
        scores, abs=1e-5
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_language_model(kind):
    def trained(place):
        lm = tiny(kind).to(place)
        log = train_lm(lm, TOKENIZER, TEXTS, steps=3, lr=1e-3, batch_size=4, progress=False)
        train_lm(
            lm,
            TOKENIZER,
            TEXTS,
            prompts=[t[:2] for t in TEXTS],
            steps=2,
            lr=1e-3,
            batch_tokens=24,
            progress=False,
        )
        return lm, log, lm_nats(lm, TOKENIZER, TEXTS, batch_size=3)

    _, there, nats = trained("cpu")
    with PretendGPU():
        lm, here, also = trained("cuda")
        assert on_gpu(lm)
    assert all(map(same, here, there)) and nats == pytest.approx(also, rel=1e-4)


def test_resume(gpu, tmp_path):
    "Two iterations are one, a checkpoint on disk, and another: to the bit, for it is the same process."

    def make():
        return RLHFTrainer(
            tiny(),
            None,
            config(device="cuda", steps=4, eval_every=1, keep_best=True),
            tokenizer=TOKENIZER,
        )

    def go(trainer, n):
        return trainer.train(PROMPTS, reward, steps=n, progress=False, held_out=PROMPTS[:3])

    whole, first, second = make(), make(), make()
    log = go(whole, 3)
    go(first, 1)
    saved = save_checkpoint(tmp_path, *flatten(first.state_dict()))
    tensors, record = load_checkpoint(saved)
    assert not on_gpu(*tensors.values())
    second.load_state_dict(unflatten(tensors, record))
    assert all(map(same, go(second, 2), log[1:])) and on_gpu(second.agent)
    moments = [x for s in second.optimizer.state.values() for k, x in s.items() if k != "step"]
    assert on_gpu(*moments)
    for a, b in zip(whole.agent.parameters(), second.agent.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "stage, flags",
    first(
        2,
        [
            ("reward-model", []),
            ("dpo", ["--lora-rank", "2"]),
            ("sft", []),
            ("sft", ["--lora-rank", "2"]),
            ("dpo", []),
        ],
    ),
)
def test_a_supervised_stage_goes_where_there_is_a_gpu(stage, flags, tmp_path, monkeypatch):
    "With the CPU's own kernels its figures are those of `--device cpu`; a GPU that is not there is refused before anything is written."
    from instruct_goose.cli.main import main
    from instruct_goose.recipes import own_model

    monkeypatch.chdir(tmp_path)
    tiny("llama").save_pretrained("base")
    TOKENIZER.save_pretrained("base")
    rows = [
        {"text": a, "prompt": "w1 ", "chosen": a, "rejected": b}
        for a, b in zip(TEXTS, reversed(TEXTS), strict=True)
        if a != b
    ] * 2
    if stage == "sft":
        rows = [{"text": row["text"]} for row in rows]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    places = []
    name = {"sft": "train_lm", "dpo": "train_dpo", "reward-model": "train_reward_model"}[stage]
    train = getattr(own_model, name)
    monkeypatch.setattr(
        own_model,
        name,
        lambda model, *args, **kwargs: (
            places.append(next(model.parameters()).device.type) or train(model, *args, **kwargs)
        ),
    )

    def losses(out, *more):
        main(
            [
                stage,
                "--model",
                "base",
                "--data",
                "data.jsonl",
                "--steps",
                "3",
                "--batch-size",
                "4",
                "--lr",
                "1e-3",
                "--held-out",
                ".25",
                "--output-dir",
                out,
                "--no-progress",
                *flags,
                *more,
            ]
        )
        return [
            json.loads(line)["loss"] for line in Path(out, "metrics.jsonl").read_text().splitlines()
        ]

    there = losses("there", "--device", "cpu")
    with PretendGPU():
        here = losses("here")
    assert places == ["cpu", "cuda"] and here == pytest.approx(there, rel=1e-4)
    with pytest.raises(SystemExit, match="no GPU here"):
        losses("nowhere", "--device", "cuda")
    assert not Path("nowhere").exists()
