"""An engine as the sampler. The stand-in checks what it is asked against vLLM's documented signatures
(0.20 to 0.32) and answers from a table, so what must come out is known without a model. vLLM itself
has not been run."""

from dataclasses import asdict
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
        for name, value in locals().items():
            if name != "self":
                setattr(self, name, value)


class Worker(WorkerExtension):
    def __init__(self):
        self.weights = {}
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(load_weights=lambda named: self.weights.update(named))
        )


class LLM:
    """Writes (seed + t) % 8 + 1, and for odd seeds the end after `length` tokens. Log-probabilities
    are −(t + 1)/10, with those of another token beside them."""

    def __init__(self, length=3):
        self.requests = []
        self.worker = Worker()
        self.cache_resets = 0
        self.length = length

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [getattr(self.worker, method)(*args, **kwargs or {})]

    def reset_prefix_cache(self):
        self.cache_resets += 1
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
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        results = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            self.requests.append((prompt["prompt_token_ids"], params))
            completion = self.complete(params, prompt["prompt_token_ids"])
            results.append(SimpleNamespace(outputs=[completion]))
        return results

    def complete(self, params, prompt):
        seed = params.seed or 0
        tokens = [(seed + t + len(prompt)) % 8 + 1 for t in range(params.max_tokens)]
        if seed % 2:
            tokens = [*tokens[: self.length - 1], 0]
        logprobs = []
        for t, token in enumerate(tokens):
            other = 7 if token != 7 else 6
            candidates = {token: -(t + 1) / 10, other: -0.01}
            logprobs.append({i: SimpleNamespace(logprob=x) for i, x in candidates.items()})
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
    small = dict(group_size=2, batch_size=6, max_new_tokens=4, device="cpu", importance_cap=1e9)
    config = RLHFConfig.preset("grpo", **small | settings)
    return RLHFTrainer(tiny(), config=config, tokenizer=tokenizer)


def trainer_with(engine, **settings):
    trainer = trainer_of(**settings)
    trainer.use_sampler(lambda agent, tokens: EngineSampler(agent, tokens, engine))
    return trainer


PROMPTS = ["the film", "a", "plot is bad"]


def test_each_response_is_a_request_with_the_prompts_ids_and_a_seed_of_its_own():
    llm = LLM()
    trainer = trainer_with(VLLMEngine(llm, SamplingParams), temperature=0.7)
    r = trainer.rollout(PROMPTS)
    prompts = [ids[mask].tolist() for ids, mask in zip(r.query_ids, r.query_mask, strict=True)]
    assert [prompt for prompt, _ in llm.requests] == prompts
    for _, params in llm.requests:
        assert (params.n, params.temperature, params.max_tokens) == (1, 0.7, 4)
        assert (params.stop_token_ids, params.ignore_eos) == ([0], True)
        assert (params.top_p, params.top_k, params.logprobs) == (1.0, 0, 0)
    assert len({params.seed for _, params in llm.requests}) == 6


def test_tokens_and_their_own_logprobs_come_back_padded():
    llm = LLM()
    r = trainer_with(VLLMEngine(llm, SamplingParams)).rollout(PROMPTS)
    for row, (prompt, params) in enumerate(llm.requests):
        tokens = list(llm.complete(params, prompt).token_ids)
        m = r.mask[row]
        assert r.response_ids[row][m].tolist() == tokens
        logprobs = [-(t + 1) / 10 for t in range(len(tokens))]
        assert r.sampled_logprobs[row][m].tolist() == pytest.approx(logprobs)
        assert not r.sampled_logprobs[row][~m].any() and not r.response_ids[row][~m].any()
    assert set(r.mask.sum(-1).tolist()) == {3, 4}
    assert r.texts is not None


def test_weights_go_out_at_the_start_and_after_each_update():
    llm = LLM()
    trainer = trainer_with(VLLMEngine(llm, SamplingParams), steps=2, lr=0.01)
    first = dict(llm.worker.weights)
    assert llm.cache_resets == 1
    assert first.keys() == engine_weights(trainer.agent.model).keys()
    assert "lm_head.weight" not in first  # tied to the embedding

    trainer.train(PROMPTS, lambda texts: [float(len(t)) for t in texts], progress=False)

    assert llm.cache_resets == 3
    trained = engine_weights(trainer.agent.model)
    assert all(torch.equal(llm.worker.weights[name], trained[name]) for name in trained)
    assert not all(torch.equal(first[name], trained[name]) for name in trained)


def test_the_likeliest_tokens_are_asked_for_at_temperature_0_and_without_a_seed():
    llm = LLM()
    trainer = trainer_of()
    sampler = EngineSampler(trainer.agent, trainer.tokens, VLLMEngine(llm, SamplingParams))
    queries = PromptBatch(torch.tensor([[1, 2]]), torch.ones(1, 2).bool())
    written = sampler(queries, 1, trainer.config, None)
    assert [(params.temperature, params.seed) for _, params in llm.requests] == [(0.0, None)]
    assert written.sampled_logprobs is None  # at temperature 0 they are not those of the policy


def test_greedy_evaluation_does_not_compare_the_engines_logprobs_with_another_temperature():
    trainer = trainer_of(temperature=0.7, importance_cap=None)
    trainer.use_sampler(
        lambda agent, tokens: EngineSampler(agent, tokens, VLLMEngine(LLM(), SamplingParams))
    )
    log = trainer.evaluate(PROMPTS, lambda texts: [1.0] * len(texts), greedy=True)
    assert log["held_out_reward"] == 1.0


def test_texts_that_end_a_response_are_refused_since_an_engine_knows_tokens_alone():
    trainer = trainer_with(VLLMEngine(LLM(), SamplingParams), stop_strings=("film",))
    with pytest.raises(ValueError, match="stop_strings is .*film.*stop_token_ids"):
        trainer.rollout(PROMPTS)


def two_rollouts():
    trainer = trainer_with(VLLMEngine(LLM(), SamplingParams), batch_size=10)
    prompts = [*PROMPTS, "the", "good"]
    return [trainer.rollout(prompts).response_ids for _ in range(2)]


def test_a_row_has_its_seed_however_many_processes_there_are():
    alone = two_rollouts()
    for shared in in_processes(2, two_rollouts, seconds=500):
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(alone[0], alone[1])


class Late:
    "The trainer's own sampler, in the trainer's precision or another, `lag` updates behind."

    def __init__(self, lag, dtype=torch.float32):
        self.model = tiny().to(dtype).eval()
        self.lag = lag
        self.past = []

    def load_weights(self, model):
        self.past.append({name: x.clone() for name, x in model.state_dict().items()})
        self.model.load_state_dict(self.past[max(0, len(self.past) - 1 - self.lag)])

    def generate(self, prompts, request):
        ids, mask = pad(prompts, 0, side="left")
        response_ids, response_mask, logprobs = sample(
            self.model,
            ids,
            mask,
            request.max_new_tokens,
            request.stop_token_ids,
            0,
            request.temperature,
            torch.Generator().manual_seed(request.seeds[0]),
            with_logprobs=True,
        )
        responses = []
        for row, m in enumerate(response_mask):
            tokens = response_ids[row][m].tolist()
            responses.append(EngineResponse(tokens, logprobs[row][m].tolist()))
        return responses


@pytest.mark.parametrize(
    "lag, dtype, found",
    [(99, torch.bfloat16, True), (1, torch.float32, False), (0, torch.bfloat16, False)],
)
def test_with_a_cap_the_doctor_finds_an_engine_without_updates_and_neither_rounding_nor_one_of_lag(
    lag, dtype, found
):
    settings = dict(steps=8, lr=0.01, batch_size=16, importance_cap=2.0)
    trainer = trainer_with(Late(lag, dtype), **settings)
    history = trainer.train(
        ["the film", "a"],
        lambda texts: [float(text.split().count("good")) for text in texts],
        progress=False,
    )
    same_precision = dtype == torch.float32
    assert (history[0]["sampler_kl"] < 1e-9) == same_precision
    if found:
        assert history[-1]["sampler_kl"] > 0.01
    findings = [finding.name for finding in diagnose(history, asdict(trainer.config))]
    assert ("sampler left behind" in findings) == found
