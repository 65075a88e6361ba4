"""An engine behind the sampler's seam. The stand-in checks what it is asked against vLLM's documented signatures (0.20 to 0.32) and answers from a
table, so what must come out is known without a model. vLLM itself has not been run."""

from types import SimpleNamespace

import pytest
import torch
from small_models import tiny

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.core.processes import in_processes
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import pad, word_tokenizer
from instruct_goose.rollouts.rollout import PromptBatch
from instruct_goose.rollouts.vllm import (
    EngineResponse,
    EngineSampler,
    VLLMEngine,
    WorkerExtension,
    engine_weights,
    use_engine,
)


class SamplingParams:
    "The arguments that are asked for, with vLLM's names and defaults; any other is a TypeError."

    def __init__(
        self,
        n=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=None,
        stop=None,
        stop_token_ids=None,
        ignore_eos=False,
        max_tokens=16,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        detokenize=True,
        skip_special_tokens=True,
        repetition_penalty=1.0,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class Worker(WorkerExtension):
    def __init__(self):
        self.weights = {}
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(load_weights=lambda named: self.weights.update(named))
        )


class LLM:
    "Writes (seed + t) % 8 + 1, the end after `length` tokens; log-probabilities −(t + 1)/10, and those of another token beside them."

    def __init__(self, length=3):
        self.asked, self.worker, self.forgot, self.length = [], Worker(), 0, length

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [getattr(self.worker, method)(*args, **kwargs or {})]

    def reset_prefix_cache(self):
        self.forgot += 1
        return True

    def generate(
        self,
        prompts,
        sampling_params=None,
        *,
        use_tqdm=True,
        lora_request=None,
        priority=None,
        tokenization_kwargs=None,
    ):
        assert len(prompts) == len(sampling_params) and all(
            set(p) == {"prompt_token_ids"} for p in prompts
        )
        self.asked += list(zip(prompts, sampling_params))
        return [
            SimpleNamespace(outputs=[self.answer(s, p["prompt_token_ids"])])
            for p, s in zip(prompts, sampling_params)
        ]

    def answer(self, s, prompt):
        tokens = [((s.seed or 0) + t + len(prompt)) % 8 + 1 for t in range(s.max_tokens)]
        if (s.seed or 0) % 2:
            tokens = tokens[: self.length - 1] + [0]
        logprobs = [
            {
                t: SimpleNamespace(logprob=-(i + 1) / 10),
                7 if t != 7 else 6: SimpleNamespace(logprob=-0.01),
            }
            for i, t in enumerate(tokens)
        ]
        return SimpleNamespace(
            token_ids=tuple(tokens),
            logprobs=logprobs,
            finish_reason="stop" if tokens[-1] == 0 else "length",
        )


def trainer_of(**settings):
    tokenizer = word_tokenizer(
        "the a film plot is good bad".split(),
        model_max_length=12,
        pad="<end>",
        bos="<end>",
        eos="<end>",
    )
    config = RLHFConfig.preset(
        "grpo",
        **dict(group_size=2, batch_size=6, max_new_tokens=4, device="cpu", importance_cap=1e9)
        | settings,
    )
    return RLHFTrainer(tiny(), config=config, tokenizer=tokenizer)


def test_what_is_asked_and_what_becomes_of_the_answer():
    trainer, llm = trainer_of(temperature=0.7), LLM()
    use_engine(trainer, VLLMEngine(llm, SamplingParams))
    r = trainer.rollout(["the film", "a", "plot is bad"])
    assert [p["prompt_token_ids"] for p, _ in llm.asked[::2]] == [
        q[m].tolist() for q, m in zip(r.query_ids[::2], r.query_mask[::2])
    ]
    for _, s in llm.asked:
        assert (
            s.n,
            s.temperature,
            s.max_tokens,
            s.logprobs,
            s.stop_token_ids,
            s.ignore_eos,
            s.top_p,
            s.top_k,
        ) == (1, 0.7, 4, 0, [0], True, 1.0, 0)
    assert len({s.seed for _, s in llm.asked}) == 6
    for row, (p, s) in enumerate(llm.asked):
        want = list(llm.answer(s, p["prompt_token_ids"]).token_ids)
        assert r.response_ids[row][r.mask[row]].tolist() == want
        assert r.sampled_logprobs[row][r.mask[row]].tolist() == pytest.approx(
            [-(t + 1) / 10 for t in range(len(want))]
        )
        assert (
            not r.sampled_logprobs[row][~r.mask[row]].any()
            and not r.response_ids[row][~r.mask[row]].any()
        )
    assert {len(row.nonzero()) for row in r.mask} == {3, 4} and r.texts is not None


def test_weights_go_out_at_the_start_and_after_each_update():
    trainer, llm = trainer_of(steps=2, lr=0.01), LLM()
    use_engine(trainer, VLLMEngine(llm, SamplingParams))
    first = dict(llm.worker.weights)
    assert (
        llm.forgot == 1
        and first.keys() == engine_weights(trainer.agent.model).keys()
        and "lm_head.weight" not in first
    )  # tied
    trainer.train(
        ["the film", "a", "plot"], lambda texts: [float(len(t)) for t in texts], progress=False
    )
    assert llm.forgot == 3
    now = engine_weights(trainer.agent.model)
    assert all(torch.equal(llm.worker.weights[k], now[k]) for k in now) and not all(
        torch.equal(first[k], now[k]) for k in now
    )


def test_the_likeliest_tokens_are_asked_for_at_temperature_0_and_without_a_seed():
    trainer, llm = trainer_of(), LLM()
    EngineSampler(trainer.agent, trainer.tokens, VLLMEngine(llm, SamplingParams))(
        PromptBatch(torch.tensor([[1, 2]]), torch.ones(1, 2).bool()), 1, trainer.config, None
    )
    assert [(s.temperature, s.seed) for _, s in llm.asked] == [(0.0, None)]


def test_a_row_has_its_seed_however_many_processes_there_are():
    def texts():
        trainer = trainer_of(batch_size=10)
        use_engine(trainer, VLLMEngine(LLM(), SamplingParams))
        return [
            trainer.rollout(["the film", "a", "plot is bad", "the", "good"]).response_ids
            for _ in range(2)
        ]

    alone, (two, other) = texts(), in_processes(2, texts, seconds=500)
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(alone, two, other)
    ) and not torch.equal(alone[0], alone[1])


class Late:
    "The trainer's own sampler, in the trainer's precision or another, `lag` updates behind."

    def __init__(self, lag, dtype=torch.float32):
        self.model, self.lag, self.past = tiny().to(dtype).eval(), lag, []

    def load_weights(self, model):
        self.past.append({k: x.clone() for k, x in model.state_dict().items()})
        self.model.load_state_dict(self.past[max(0, len(self.past) - 1 - self.lag)])

    def generate(self, prompts, wanted):
        ids, mask = pad(prompts, 0, side="left")
        dice = torch.Generator().manual_seed(wanted.seeds[0])
        rows = sample(
            self.model,
            ids,
            mask,
            wanted.max_new_tokens,
            wanted.stop_token_ids,
            0,
            wanted.temperature,
            dice,
            with_logprobs=True,
        )
        return [
            EngineResponse(tokens[real].tolist(), logprobs[real].tolist())
            for tokens, real, logprobs in zip(*rows)
        ]


@pytest.mark.parametrize(
    "lag, dtype, found",
    [(99, torch.bfloat16, True), (1, torch.float32, False), (0, torch.bfloat16, False)],
)
def test_with_a_cap_the_doctor_hears_a_deaf_engine_and_neither_rounding_nor_one_update_of_lag(
    lag, dtype, found
):
    trainer = trainer_of(steps=8, lr=0.01, batch_size=16, importance_cap=2.0)
    use_engine(trainer, Late(lag, dtype))
    history = trainer.train(
        ["the film", "a"],
        lambda texts: [float(text.split().count("good")) for text in texts],
        progress=False,
    )
    assert (history[0]["sampler_kl"] < 1e-9) == (dtype == torch.float32) and (
        history[-1]["sampler_kl"] > 0.01
    ) >= found
    assert (
        "sampler left behind" in [f.name for f in diagnose(history, vars(trainer.config))]
    ) == found
