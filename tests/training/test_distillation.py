"""The exact divergence from a teacher: against loops, finite differences, and the estimator of the sampled token."""

import copy
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.models.response import response_logits
from instruct_goose.models.teacher import DISTILLATION, Teacher
from instruct_goose.objective.policy_loss import policy_loss
from instruct_goose.rollouts.multi_turn import TurnSampler
from instruct_goose.rollouts.rollout import Rollout, attach_texts
from instruct_goose.tasks.exact_world import PROMPTS, enumerate_logprobs, make_world, tiny_policy
from instruct_goose.tasks.probes import tiny_world
from instruct_goose.training.distillation import (
    DistillationTrainer,
    no_reward,
    token_divergence,
)

WORLD = make_world()
SETTINGS = DISTILLATION | dict(
    batch_size=48, max_new_tokens=3, steps=12, lr=6e-3, lr_schedule="linear", device="cpu"
)


def kl_by_hand(p_logits, q_logits):
    "Σ p·log(p/q) with numbers alone."
    p = [math.exp(x) for x in p_logits]
    q = [math.exp(x) for x in q_logits]
    return sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q))


def random_logits(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)


MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_divergence_is_the_sum_over_the_vocabulary(direction):
    student, teacher = random_logits(0), random_logits(1)
    got = token_divergence(student, teacher, MASK, direction)
    for row in range(2):
        for t in range(3):
            pair = student[row, t].tolist(), teacher[row, t].tolist()
            wanted = kl_by_hand(*(pair if direction == "reverse" else pair[::-1]))
            wanted = wanted if MASK[row, t] else 0.0
            assert math.isclose(got[row, t].item(), wanted, abs_tol=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_its_gradient_is_that_of_finite_differences_and_the_teacher_gets_none(direction):
    student = random_logits(2).requires_grad_()
    teacher = random_logits(3).requires_grad_()
    token_divergence(student, teacher, MASK, direction).sum().backward()
    assert teacher.grad is None
    step = 1e-6
    for where in [(0, 0, 1), (0, 2, 4), (1, 0, 0), (1, 1, 2)]:
        values = []
        for sign in (1, -1):
            moved = student.detach().clone()
            moved[where] += sign * step
            values.append(token_divergence(moved, teacher, MASK, direction).sum().item())
        slope = (values[0] - values[1]) / (2 * step)
        assert math.isclose(slope, student.grad[where].item(), abs_tol=1e-8)


def every_response(student):
    "A rollout of all 40 responses to each prompt, and the chance of each."
    n = len(WORLD.response_ids)
    rollout = Rollout(
        *WORLD.queries(copies=n),
        WORLD.response_ids.repeat(len(PROMPTS), 1),
        WORLD.mask.repeat(len(PROMPTS), 1),
    )
    logprobs = enumerate_logprobs(student, WORLD).detach().reshape(len(rollout), -1)
    rollout.sampled_logprobs = logprobs
    return rollout, logprobs.sum(-1).exp()


def test_the_mean_gradient_is_that_of_the_sampled_tokens_with_discount_0():
    "Over all responses the exact reverse KL and log π_T − log π of the sampled token agree."
    student, teacher = tiny_policy("absolute", seed=5), tiny_policy("rotary", seed=6)
    rollout, chance = every_response(student)
    weights = list(student.parameters())
    trainer = RLHFTrainer(
        student, config=RLHFConfig(**SETTINGS | {"gamma": 0.0}), tokenizer=WORLD.tokenizer
    )
    scored = trainer.score(attach_texts(rollout, WORLD.tokenizer), Teacher(teacher))
    advantages = trainer.advantages(scored).advantages
    new = enumerate_logprobs(student, WORLD).flatten(0, 1)
    sampled = policy_loss(new, rollout.sampled_logprobs, advantages, rollout.mask).sum(-1)
    wanted = torch.autograd.grad((chance * sampled).sum(), weights)
    columns = rollout.query_ids, rollout.query_mask, rollout.response_ids, rollout.mask
    with torch.no_grad():
        teacher_logits = response_logits(teacher, *columns)
    exact = token_divergence(response_logits(student, *columns), teacher_logits, rollout.mask)
    got = torch.autograd.grad((chance * exact.sum(-1)).sum(), weights)
    largest = max(x.abs().max().item() for x in wanted)
    for a, b in zip(got, wanted):
        assert (a - b).abs().max() < 1e-4 * largest


def mean_token_kl(student, teacher):
    "E over the student's responses of the mean token KL, by enumeration."
    rollout, chance = every_response(student)
    columns = rollout.query_ids, rollout.query_mask, rollout.response_ids, rollout.mask
    with torch.no_grad():
        each = token_divergence(
            response_logits(student, *columns), response_logits(teacher, *columns), rollout.mask
        )
    return (chance * each.sum(-1)).sum().item() / len(PROMPTS)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_student_comes_near_its_teacher(direction):
    teacher = tiny_policy("rotary", seed=7)
    trainer = DistillationTrainer(
        tiny_policy("absolute", seed=8),
        teacher,
        RLHFConfig(**SETTINGS),
        direction=direction,
        tokenizer=WORLD.tokenizer,
    )
    frozen = copy.deepcopy(teacher.state_dict())
    before = mean_token_kl(trainer.agent.model, teacher)
    log = trainer.train(list(PROMPTS), no_reward, progress=False)
    assert mean_token_kl(trainer.agent.model, teacher) < before / 2
    assert log[-1]["teacher_kl"] < log[0]["teacher_kl"] / 2
    assert all(torch.equal(x, frozen[name]) for name, x in teacher.state_dict().items())


def test_the_policy_with_more_to_read_is_a_teacher_without_gradient():
    "At the first update the policy itself and a frozen copy of it give one gradient."
    ids = WORLD.tokenizer(PROMPTS[2])["input_ids"]
    student = tiny_policy("absolute", seed=9)
    gradients = []
    for teacher in (None, copy.deepcopy(student)):
        trainer = DistillationTrainer(
            copy.deepcopy(student),
            teacher,
            RLHFConfig(**SETTINGS),
            teacher_prompt=lambda prompt_ids: list(ids),
            tokenizer=WORLD.tokenizer,
        )
        rollout = trainer.score(trainer.rollout([PROMPTS[0]] * 12), no_reward)
        batch = trainer.advantages(rollout)
        loss, parts = trainer.loss(trainer.evaluate_tokens(batch), batch)
        assert parts["teacher_kl"] == loss.detach() > 0
        weights = list(trainer.agent.model.parameters())
        gradients.append(torch.autograd.grad(loss, weights, allow_unused=True))
    for a, b in zip(*gradients):
        assert (a is None and b is None) or torch.equal(a, b)


def test_the_teacher_reads_its_own_prompt():
    ids = WORLD.tokenizer(PROMPTS[2])["input_ids"]
    student = tiny_policy("absolute", seed=9)
    trainer = DistillationTrainer(
        student,
        None,
        RLHFConfig(**SETTINGS),
        teacher_prompt=lambda prompt_ids: prompt_ids + list(ids),
        tokenizer=WORLD.tokenizer,
    )
    batch = trainer.rollout([PROMPTS[0], PROMPTS[1]])
    got = trainer.teacher_logits(batch)
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens = WORLD.tokenizer(prompt)["input_ids"] + list(ids)
        response = batch.response_ids[row][batch.mask[row]].tolist()
        with torch.no_grad():
            logits = student(torch.tensor([tokens + response])).logits[0]
        wanted = logits[len(tokens) - 1 : len(tokens) - 1 + len(response)]
        assert torch.allclose(got[row][batch.mask[row]], wanted, atol=1e-5)


def test_what_cannot_teach_is_refused():
    student = tiny_policy("absolute")
    config = RLHFConfig(**SETTINGS)
    with pytest.raises(ValueError, match="nothing to learn"):
        DistillationTrainer(student, None, config, tokenizer=WORLD.tokenizer)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="the teacher has 99 tokens"):
        DistillationTrainer(student, other, config, tokenizer=WORLD.tokenizer)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_both_models_read_what_an_environment_wrote(direction):
    "Against a loop over the rows, in which each state holds the environment's words too."
    student, tokenizer = tiny_world((0.2, 0.2, 0.2, 0.4))
    teacher, _ = tiny_world((0.7, 0.1, 0.1, 0.1), seed=5)
    torch.manual_seed(1)
    for model in (student, teacher):
        torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    settings = DISTILLATION | dict(batch_size=8, max_new_tokens=8, device="cpu")
    trainer = DistillationTrainer(
        student, teacher, RLHFConfig(**settings), tokenizer=tokenizer, direction=direction
    )
    trainer.use_sampler(lambda agent, tokens: TurnSampler(agent, tokens, lambda text: "b c"))
    rollout = trainer.score(trainer.rollout(["a", "c"] * 4), no_reward)
    experience = trainer.advantages(rollout)
    assert experience.environment_mask.any()

    divergences = []
    for i in range(len(experience)):
        query = experience.query_ids[i][experience.query_mask[i]]
        real = experience.attention_mask[i]
        ids = torch.cat([query, experience.response_ids[i][real]])[None]
        for t, own in enumerate(experience.mask[i][real]):
            if own:
                with torch.no_grad():
                    pair = [m.eval()(ids).logits[0, len(query) - 1 + t] for m in (student, teacher)]
                pair = [logits.double().tolist() for logits in pair]
                divergences.append(kl_by_hand(*(pair if direction == "reverse" else pair[::-1])))
    loss, _ = trainer.loss(trainer.evaluate_tokens(experience), experience)
    assert math.isclose(loss.item(), sum(divergences) / len(divergences), rel_tol=1e-5)


def test_autocast_holds_for_teacher_and_student_and_the_loss_stays_in_float32():
    student, teacher = tiny_policy("absolute", seed=2), tiny_policy("absolute", seed=3)
    settings = RLHFConfig(**SETTINGS | dict(batch_size=4, autocast="bfloat16"))
    trainer = DistillationTrainer(student, teacher, settings, tokenizer=WORLD.tokenizer)
    rollout = trainer.rollout(list(PROMPTS)[:4])
    experience = trainer.advantages(trainer.score(rollout, no_reward))
    dtypes = []
    for model in (trainer.agent.model, trainer.teacher):
        model.lm_head.register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
    evaluation = trainer.evaluate_tokens(experience)
    dtypes.clear()
    loss, _ = trainer.loss(evaluation, experience)
    assert dtypes == [torch.bfloat16] * 2
    assert loss.dtype == torch.float32


def test_a_run_goes_on_in_its_own_direction_alone():
    def made(direction):
        settings = RLHFConfig(**SETTINGS)
        teacher = tiny_policy("absolute", seed=1)
        return DistillationTrainer(
            tiny_policy("absolute"),
            teacher,
            settings,
            tokenizer=WORLD.tokenizer,
            direction=direction,
        )

    state = made("reverse").state_dict()
    made("reverse").check_state_dict(state)
    with pytest.raises(ValueError, match="direction was 'reverse' and is 'forward'"):
        made("forward").load_state_dict(state)


def test_a_run_goes_on_with_its_own_teacher_alone():
    "A teacher with one weight that differs is another one; the student has not changed then."

    def made(teacher):
        settings = RLHFConfig(**SETTINGS)
        return DistillationTrainer(
            tiny_policy("absolute"), teacher, settings, tokenizer=WORLD.tokenizer
        )

    teacher = tiny_policy("absolute", seed=1)
    run = made(teacher)
    run.train(list(PROMPTS), no_reward, steps=1, progress=False)
    state = run.state_dict()
    same = made(copy.deepcopy(teacher))
    same.load_state_dict(state)
    assert same.iteration == 1

    other_teacher = copy.deepcopy(teacher)
    with torch.no_grad():
        next(other_teacher.parameters()).view(-1)[0] += 1e-3
    other = made(other_teacher)
    before = copy.deepcopy(other.agent.state_dict())
    with pytest.raises(ValueError, match="the teacher is not the one of this checkpoint"):
        other.load_state_dict(state)
    assert other.iteration == 0
    assert all(torch.equal(x, other.agent.state_dict()[name]) for name, x in before.items())
