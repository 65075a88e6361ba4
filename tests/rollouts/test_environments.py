"""Environments of three protocols as a sampler. The oracles: the environments' own code, played by hand,
a slow loop that reads the whole text again for each token, advantages by a double loop, and what the
protocols document of each method."""

import itertools
import random
from types import SimpleNamespace

import gymnasium
import pytest
import torch

from instruct_goose import RLHFConfig, RLHFTrainer
from instruct_goose.core.processes import in_processes
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import unpad, word_tokenizer
from instruct_goose.objective.advantages import AdvantageInputs
from instruct_goose.rollouts.environments import (
    Answer,
    EnvironmentFailed,
    EnvironmentSampler,
    MessageEnvironment,
    StepEnvironment,
    ToolCall,
    ToolEnvironment,
    Turn,
    adapt_environment,
    call_with_known,
    columns_read,
    environment_reward,
    explain_failure,
    finished_value,
    is_paying,
    new_state,
    observation_of,
    observation_text,
    parse_tool_calls,
    parse_turn,
    prompt_row,
    public_methods,
    reply_text,
    reward_table,
    step_result,
    tool_call_message,
    turn_advantages,
    turn_numbers,
    with_observation,
)
from instruct_goose.rollouts.multi_turn import Episode
from instruct_goose.rollouts.rollout import concat
from instruct_goose.tasks.games import Calculator, GuessingGame, tool_model

NUMBERS = [str(i) for i in range(1, 8)]
SECRETS = [{"prompt": "guess", "secret": number} for number in range(1, 8)]


def turn(text="", *calls):
    return Turn(text, list(calls))


def trainer_of(factory=GuessingGame, words=("higher", "lower", "right", "guess"), **settings):
    model, tokenizer = tiny_smollm([*NUMBERS, *words])
    tokenizer.chat_template = None
    defaults = dict(batch_size=14, group_size=2, max_new_tokens=12, device="cpu", beta=0.0)
    config = RLHFConfig.preset(
        "grpo", stop_strings=tuple(NUMBERS), **{**defaults, "lr": 1e-2, **settings}
    )
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    trainer.use_sampler(lambda agent, tokens: EnvironmentSampler(agent, tokens, factory))
    return trainer


# ---------------------------------------------------------------- protocols


def test_tools_are_public_methods_and_get_reward_ends_the_episode():
    environment = adapt_environment(Calculator())
    assert isinstance(environment, ToolEnvironment)
    assert sorted(environment.tools) == ["add", "submit"]
    assert environment.begin({"prompt": "3 + 4", "a": 3, "b": 4, "more": 1}, 0) is None
    answer = environment.answer(turn("", ToolCall("add", {"a": 3, "b": 4})))
    assert answer == Answer([{"role": "tool", "name": "add", "content": "7"}], None, 1, 0)
    assert environment.final_reward() == 0.0
    environment.answer(turn("", ToolCall("submit", {"value": 7})))
    assert environment.final_reward() == 1.0
    assert environment.answer(turn("done")).messages == []
    environment.begin({"a": 1, "b": 1}, 0)
    assert environment.final_reward() == 0.0  # a new episode


def test_errors_of_tools_are_read_by_the_policy_and_counted():
    environment = adapt_environment(Calculator())
    environment.begin({"a": 3, "b": 4}, 0)
    calls = [ToolCall("add", {"a": 1}), ToolCall("open", {}), ToolCall("add", {"a": 1, "b": 1})]
    answer = environment.answer(turn("", *calls))
    texts = [message["content"] for message in answer.messages]
    assert "required" in texts[0] and "'b'" in texts[0]
    assert texts[1:] == ["{'error': 'Tool open not found.'}", "2"]
    assert (answer.calls, answer.failures) == (3, 2)


def test_an_environment_without_get_reward_pays_nothing_and_reset_may_speak():
    class Talks:
        def reset(self, **row):
            return f" {row['secret']}"

        async def look(self) -> str:
            "Look."
            return "seen"

    environment = adapt_environment(Talks())
    assert environment.begin({"prompt": "a", "secret": 5}, 0) == " 5"
    assert environment.answer(turn("", ToolCall("look", {}))).messages[0]["content"] == "seen"
    assert environment.final_reward() is None


def test_a_class_with_get_reward_has_tools_even_if_one_is_called_step():
    class Walk(Calculator):
        def step(self, direction: str) -> str:
            "Walk."
            return direction

    assert isinstance(adapt_environment(Walk()), ToolEnvironment)


def test_steps_pay_at_once_and_end_the_episode():
    environment = adapt_environment(GuessingGame())
    assert isinstance(environment, StepEnvironment)
    assert environment.begin({"prompt": "guess", "secret": 5}, 0) is None
    assert environment.answer(turn("4")) == Answer([{"role": "user", "content": "higher"}], 0.0)
    assert environment.answer(turn("6")) == Answer([{"role": "user", "content": "lower"}], 0.0)
    assert environment.answer(turn(" 5 ")) == Answer([], 1.0)
    assert environment.final_reward() == 0.0


def test_three_guesses_find_each_of_seven_numbers_and_two_do_not():
    def found(guesses, plan):
        wins = 0
        for secret in range(1, 8):
            game = GuessingGame(7, guesses)
            game.reset(options={"secret": secret})
            low, high, paid = 1, 7, 0.0
            for _ in range(guesses):
                guess = plan(low, high)
                hint, paid, is_right, is_over, _ = game.step(str(guess))
                if is_right or is_over:
                    break
                low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
            wins += paid
        return wins

    assert found(3, lambda low, high: (low + high) // 2) == 7
    assert found(2, lambda low, high: (low + high) // 2) == 3
    assert found(3, lambda low, high: low) == 3


def test_results_of_a_step_of_any_form():
    def answer_of(result):
        instance = SimpleNamespace(reset=lambda: "a", step=lambda action: result)
        return StepEnvironment(instance).answer(turn("x"))

    goes_on = Answer([{"role": "user", "content": "b"}], 0.5)
    assert answer_of(("b", 0.5, False, False, {})) == goes_on
    assert answer_of(("b", 0.5, False, {})) == goes_on
    assert answer_of(("b", 0.5, False)) == goes_on
    assert answer_of(SimpleNamespace(observation="b", reward=0.5, done=False)) == goes_on
    assert answer_of(("b", 0.5, False, True, {})) == Answer([], 0.5)
    assert answer_of(SimpleNamespace(observation="b", reward=None, done=True)) == Answer([], 0.0)
    with pytest.raises(TypeError, match="step of SimpleNamespace returned 'b': return"):
        answer_of("b")
    with pytest.raises(TypeError, match="the policy reads text"):
        answer_of((3, 0.5, False))


def test_gymnasium_itself_with_actions_and_observations_as_texts():
    "FrozenLake, 4×4, without slipping: right, right, down, down, down, right reaches the goal."
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
    names = {"left": 0, "down": 1, "right": 2, "up": 3}
    environment = StepEnvironment(lake, action=names.__getitem__, describe=str)
    assert environment.begin({"prompt": "go"}, 7) == "0"
    moves = ["right", "right", "down", "down", "down", "right"]
    answers = [environment.answer(turn(move)) for move in moves]
    seen = [message["content"] for answer in answers for message in answer.messages]
    assert seen == ["1", "2", "6", "10", "14"]
    assert [answer.reward for answer in answers] == [0, 0, 0, 0, 0, 1]


class Messages:
    "The protocol of verifiers, early form, as a plain class."

    class rubric:  # noqa: N801
        @staticmethod
        async def score_rollout(state):
            state["reward"] = -float(state["turn"])

    async def setup_state(self, state):
        state["secret"] = int(state["answer"])
        return state

    async def is_completed(self, messages, state, **kwargs):
        return state["turn"] > 0 and messages[-1]["content"] in ("right", str(state["secret"]))

    async def env_response(self, messages, state, **kwargs):
        assert messages[0] == {"role": "user", "content": "guess"}
        return [{"role": "user", "content": "higher"}], state


def test_messages_and_state_are_handed_over():
    environment = adapt_environment(Messages())
    assert isinstance(environment, MessageEnvironment)
    assert environment.begin({"prompt": "guess", "answer": "5"}, 0) is None
    assert environment.answer(turn("4")).messages == [{"role": "user", "content": "higher"}]
    assert environment.answer(turn("5")).messages == []
    assert environment.final_reward() == -2.0
    roles = [message["role"] for message in environment.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert environment.state["completion"] == environment.messages[1:]


def test_what_is_no_environment_is_refused():
    with pytest.raises(TypeError, match="list is no environment: it has neither reset"):
        adapt_environment([])
    own = SimpleNamespace(begin=print, answer=print, final_reward=print)
    assert adapt_environment(own) is own


def test_tool_calls_are_json_between_marks_and_one_that_is_broken_spoils_all():
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse_tool_calls(f"well {good} and {good}") == [ToolCall("add", {"a": 1})] * 2
    assert parse_tool_calls('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now", {})]
    for broken in ("{", "[]", '{"arguments": {}}', '{"name": "a", "arguments": 3}'):
        assert parse_tool_calls(f"{good}<tool_call>{broken}</tool_call>") == []
    assert parse_tool_calls("<tool_call>no end") == []


# ---------------------------------------------------------------- the sampler


def slow_episode(trainer, secret):
    "One game with the likeliest tokens, each from the whole text: ids, sampled, rewards."
    tokenizer = trainer.tokenizer
    prompt = tokenizer("guess")["input_ids"]
    ids, sampled, rewards = [], [], []
    game = GuessingGame()
    game.reset(options={"secret": secret})
    turn_ids = []
    while len(ids) < 12:
        with torch.no_grad():
            logits = trainer.agent.model(torch.tensor([prompt + ids])).logits[0, -1]
        token = int(logits.argmax())
        ids.append(token)
        turn_ids.append(token)
        sampled.append(1)
        rewards.append(0.0)
        word = tokenizer.convert_ids_to_tokens(token)
        if token != tokenizer.eos_token_id and word not in NUMBERS:
            continue
        text = tokenizer.decode(turn_ids, skip_special_tokens=True)
        hint, reward, is_right, is_over, _ = game.step(text)
        rewards[-1] += reward
        reply = tokenizer(hint, add_special_tokens=False)["input_ids"]
        if is_right or is_over or len(ids) + len(reply) >= 12:
            break
        ids += reply
        sampled += [0] * len(reply)
        rewards += [0.0] * len(reply)
        turn_ids = []
    return ids, sampled, rewards


def test_many_games_at_once_are_what_each_is_alone():
    trainer = trainer_of(steps=12, batch_size=56, group_size=8)
    trainer.train(SECRETS, environment_reward, progress=False)
    rollout = trainer.generate(SECRETS, 1, None)
    read = rollout.attention_mask
    turns = set()
    for i, row in enumerate(SECRETS):
        ids, sampled, rewards = slow_episode(trainer, row["secret"])
        assert rollout.response_ids[i][read[i]].tolist() == ids
        assert rollout.mask[i][read[i]].int().tolist() == sampled
        assert rollout.environment_rewards[i][read[i]].tolist() == rewards
        assert rollout.episodes["replies"][i] == sampled.count(0)
        turns.add(sampled.count(0))
    assert len(turns) > 1  # the games differ in length


def test_a_step_pays_each_turn_and_logs_what_happened():
    trainer = trainer_of()
    rollout = trainer.score(trainer.rollout(SECRETS), environment_reward)
    assert torch.equal(rollout.token_scores, rollout.environment_rewards)
    assert rollout.scores.tolist() == rollout.environment_rewards.sum(-1).tolist()
    assert not (rollout.environment_rewards != 0)[~rollout.mask].any()
    metrics = trainer_of().step(SECRETS, environment_reward)
    assert metrics["replies"] == sum(rollout.episodes["replies"]) / 14
    assert metrics["tool_calls"] == metrics["tool_failures"] == 0


class PaysTurns:
    "Pays each of two turns, the second one with nothing, and the episode not at all."

    def begin(self, row, seed):
        self.turns = 0

    def answer(self, turn):
        self.turns += 1
        if self.turns == 1:
            return Answer([{"role": "user", "content": "higher"}], 0.25)
        return Answer([], 0.0)

    def final_reward(self):
        return None


def test_an_environment_that_pays_by_turns_only_is_paid():
    rollout = trainer_of(PaysTurns).rollout(SECRETS)
    assert rollout.environment_rewards.sum(-1).tolist() == [0.25] * 14
    for i in range(14):
        paid = rollout.environment_rewards[i].nonzero().flatten().tolist()
        reply = (rollout.attention_mask[i] & ~rollout.mask[i]).nonzero().flatten()
        assert paid == [reply[0] - 1]  # the last token that was sampled before the reply


class PaysEach:
    "Pays 1 for each turn that it sees, and never ends."

    def begin(self, row, seed):
        return None

    def answer(self, turn):
        return Answer([{"role": "user", "content": "higher"}], 1.0)

    def final_reward(self):
        return None


class CountsAnswers(Messages):
    "The protocol of verifiers; the rubric pays 1 for each turn of the policy that it can read."

    class rubric:  # noqa: N801
        @staticmethod
        def score_rollout(state):
            roles = [message["role"] for message in state["completion"]]
            state["reward"] = float(roles.count("assistant"))

    async def setup_state(self, state):
        return state

    async def is_completed(self, messages, state, **kwargs):
        return False


@pytest.mark.parametrize("factory", [PaysEach, CountsAnswers])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_the_turn_behind_the_last_reply_is_paid_and_its_answer_reaches_nobody(factory, turns):
    trainer = trainer_of(factory)
    trainer.use_sampler(
        lambda agent, tokens: EnvironmentSampler(agent, tokens, factory, turns=turns)
    )
    rollout = trainer.rollout(SECRETS)
    tokenizer = trainer.tokens.tokenizer
    ends = torch.tensor([*tokenizer.convert_tokens_to_ids(NUMBERS), *trainer.eos_ids])
    ended = (torch.isin(rollout.response_ids, ends) & rollout.mask).sum(-1)  # turns, by row
    assert rollout.environment_rewards.sum(-1).tolist() == ended.tolist()
    assert max(rollout.episodes["replies"]) == turns
    assert ended.max() == turns + 1


def test_no_tool_is_called_when_nobody_would_read_its_result():
    class Once:
        def reset(self):
            return None

        def look(self) -> str:
            "Look."
            raise AssertionError("called")

    trainer = trainer_of(Once)
    sampler = EnvironmentSampler(trainer.agent, trainer.tokens, Once, turns=0)
    sampler.begin(SECRETS[:1], 1, None)
    sampler.see_last_turn(Episode([1], row=0))
    assert sampler.answers == [[]]


def test_several_rewards_beside_the_environments():
    def short(completion_ids):
        return [-float(len(ids)) for ids in completion_ids]

    trainer = trainer_of(reward_weights=(2.0, 0.5))
    rollout = trainer.score(trainer.rollout(SECRETS), [environment_reward, short])
    lengths = rollout.attention_mask.sum(-1)
    expected = 2 * rollout.environment_rewards.sum(-1) - 0.5 * lengths
    assert torch.allclose(rollout.scores, expected)


def test_responses_to_a_prompt_begin_with_the_same_seed_and_observation():
    class Shown(GuessingGame):
        def reset(self, seed):
            self.secret = random.Random(seed).randint(1, 7)
            self.left = 3
            return f" {self.secret}", {}

    trainer = trainer_of(Shown)
    prompts = ["guess"] * 7
    rollout = trainer.rollout(prompts)
    texts = trainer.tokenizer.batch_decode(unpad(rollout.query_ids, rollout.query_mask))
    assert texts[::2] == texts[1::2] and len(set(texts)) > 1
    again = trainer_of(Shown).rollout(prompts)
    assert torch.equal(rollout.response_ids, again.response_ids)
    assert rollout.columns["prompt"] == texts


def test_the_tools_are_shown_where_the_template_knows_them():
    model, tokenizer = tool_model(["1", "+", "2"], ["add", "submit"], ["a", "b", "value"])
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        + tokenizer.chat_template
    )
    config = RLHFConfig.preset("grpo", device="cpu", beta=0.0)
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    sampler = EnvironmentSampler(trainer.agent, trainer.tokens, Calculator)
    row = {"prompt": [{"role": "user", "content": "1 + 2"}], "a": 1, "b": 2}
    names = [tool["function"]["name"] for tool in sampler.begin([row], 1, None)[0]["tools"]]
    assert names == ["add", "submit"]
    hidden = EnvironmentSampler(trainer.agent, trainer.tokens, Calculator, show_tools=False)
    assert "tools" not in hidden.begin([row], 1, None)[0]


def test_a_turn_that_ends_with_a_stop_string_gets_the_templates_end():
    trainer = trainer_of(lambda: GuessingGame(guesses=4), max_new_tokens=30)
    _, tokenizer = tiny_smollm(NUMBERS)
    trainer.tokenizer.chat_template = tokenizer.chat_template
    rollout = trainer.rollout(SECRETS)
    texts = trainer.tokenizer.batch_decode(unpad(rollout.response_ids, rollout.attention_mask))
    answered = [text for text, n in zip(texts, rollout.episodes["replies"], strict=True) if n]
    assert answered
    marks = "<|im_end|> <|im_start|> user"
    for text in answered:
        assert f"{marks} higher" in text or f"{marks} lower" in text
        assert "<|im_end|> <|im_end|>" not in text


def test_what_environments_cannot_do_is_refused():
    trainer = trainer_of()
    with pytest.raises(TypeError, match="prompt 0 is token ids"):
        trainer.rollout([[4, 5]])
    with pytest.raises(TypeError, match="the prompts are query_ids"):
        trainer.rollout({"query_ids": torch.ones(2, 2), "query_mask": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="0 environments have been reset, and 2 responses"):
        trainer.sampler(trainer.encode(["guess"]), 2, trainer.config, None)

    class Silent(GuessingGame):
        def step(self, action):
            return "", 0.0, False

    with pytest.raises(ValueError, match="has no token: answer with text"):
        trainer_of(Silent).rollout(SECRETS)


def test_without_a_reward_of_the_environment_the_reward_function_says_so():
    class Free:
        def reset(self, **row):
            return None

        def look(self) -> str:
            "Look."
            return "1"

    trainer = trainer_of(Free)
    rollout = trainer.rollout(SECRETS)
    assert rollout.environment_rewards is None
    with pytest.raises(ValueError, match="asks for 'environment_rewards'"):
        trainer.score(rollout, environment_reward)
    assert trainer.score(rollout, lambda texts: [1.0] * len(texts)).scores.sum() == 14


def test_rollouts_with_and_without_an_environments_rewards_are_concatenated():
    paid = trainer_of().rollout(SECRETS)
    free = trainer_of().rollout(SECRETS)
    free.environment_rewards = None
    both = concat([paid, free])
    assert both.environment_rewards[:14].equal(paid.environment_rewards)
    assert not both.environment_rewards[14:].any()
    assert both.episodes["replies"] == paid.episodes["replies"] + free.episodes["replies"]
    assert both[[3, 20]].episodes["replies"] == [
        paid.episodes["replies"][3],
        free.episodes["replies"][6],
    ]


def one_rollout():
    trainer = trainer_of()
    rollout = trainer.score(trainer.rollout(SECRETS), environment_reward)
    return rollout.response_ids, rollout.mask, rollout.scores, rollout.episodes["replies"]


def test_two_processes_play_the_games_that_one_plays():
    alone = one_rollout()
    for shared in in_processes(2, one_rollout, seconds=500):
        for a, b in zip(alone, shared, strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b


# ---------------------------------------------------------------- credit by turns


def slow_turn_advantages(rewards, mask, group):
    "The definition, by loops over responses, turns and tokens."
    rows = []
    for row in mask.tolist():
        number = -1
        numbers = []
        before = False
        for own in row:
            if own and not before:
                number += 1
            numbers.append(number if own else -1)
            before = own
        rows.append(numbers)
    result = torch.zeros_like(rewards)
    for i, numbers in enumerate(rows):
        first = i // group * group
        for k in set(numbers) - {-1}:

            def earned(j, k=k):
                pairs = zip(rewards[j].tolist(), rows[j], strict=True)
                return sum(reward for reward, number in pairs if number >= k)

            others = [j for j in range(first, first + group) if j != i and k in rows[j]]
            if not others:
                continue
            advantage = earned(i) - sum(earned(j) for j in others) / len(others)
            for t, number in enumerate(numbers):
                if number == k:
                    result[i, t] = advantage
    return result, torch.tensor(rows)


def test_turn_advantages_are_the_definition():
    generator = torch.Generator().manual_seed(0)
    for group, _ in itertools.product((2, 3), range(20)):
        mask = torch.rand(2 * group, 9, generator=generator) < 0.6
        mask[:, 0] = True
        rewards = torch.randn(2 * group, 9, generator=generator, dtype=torch.float64)
        rewards[~mask] = torch.nan
        inputs = AdvantageInputs(rewards, mask, None, None, group, 1, 1.0, 1.0)
        expected, numbers = slow_turn_advantages(rewards, mask, group)
        assert turn_numbers(mask).equal(numbers)
        assert torch.allclose(turn_advantages(inputs)[0], expected, atol=1e-12)


def test_the_mean_gradient_is_that_of_whole_responses():
    """Two turns of two actions each, π(1) = p in the first and q in the second; all pairs of
    responses are enumerated. The gradient in (p, q) is the same with both advantages."""
    p, q = 0.3, 0.6
    paid = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): -2.0, (1, 1): 0.5}  # at the second turn
    first_paid = {0: 0.25, 1: -1.0}
    mask = torch.tensor([[1, 0, 1], [1, 0, 1]]).bool()

    def probability(a):
        return (p if a[0] else 1 - p) * (q if a[1] else 1 - q)

    def score(a):
        return torch.tensor(
            [1 / p if a[0] else -1 / (1 - p), 1 / q if a[1] else -1 / (1 - q)],
            dtype=torch.float64,
        )

    gradients = {"turns": torch.zeros(2).double(), "whole": torch.zeros(2).double()}
    for a, b in itertools.product(paid, paid):
        rewards = torch.tensor(
            [[first_paid[x[0]], 0.0, paid[x]] for x in (a, b)], dtype=torch.float64
        )
        inputs = AdvantageInputs(rewards, mask, None, None, 2, 1, 1.0, 1.0)
        by_turn, _ = turn_advantages(inputs)
        whole = inputs.compared("leave_one_out")
        for name, advantages in (("turns", by_turn), ("whole", whole)):
            weight = probability(a) * probability(b)
            gradients[name] += weight * score(a) * advantages[0, [0, 2]]
    assert torch.allclose(gradients["turns"], gradients["whole"], atol=1e-12)
    assert gradients["turns"].abs().min() > 0.1


def test_games_with_one_prompt_and_different_secrets_are_one_prompt_in_the_log():
    "The doctor compares how many different prompts are given and answered."
    metrics = trainer_of().step(SECRETS, environment_reward)
    assert metrics["prompts_given"] == metrics["distinct_prompts"] == 1


# ----------------------------------------------------------- what an environment reads, pays and raises


class ReadsTwo:
    def reset(self, a, b=3):
        return None

    def look(self) -> str:
        "Look."
        return ""


class StepsWithSeed:
    def reset(self, seed, level, **ignored):
        return ""

    def step(self, action):
        return "", 0.0, True


def messages_environment(**more):
    nothing = SimpleNamespace(env_response=lambda messages, state: [], is_completed=lambda s: True)
    vars(nothing).update(more)
    return nothing


@pytest.mark.parametrize(
    "instance, columns, pays",
    [
        (Calculator(), {"a", "b", "**"}, True),
        (ReadsTwo(), {"a", "b"}, False),
        (StepsWithSeed(), {"seed", "level"}, True),  # **kwargs of reset get nothing
        (GuessingGame(), {"**"}, True),  # a row is among Gymnasium's options
        (messages_environment(), {"**"}, False),
        (messages_environment(rubric=object()), {"**"}, True),
    ],
)
def test_what_reset_reads_and_whether_it_pays(instance, columns, pays):
    environment = adapt_environment(instance)
    assert columns_read(environment) == columns
    assert is_paying(environment) == pays


class Breaks:
    "Raises where it is told to."

    def __init__(self, where):
        self.where = where

    def reset(self, secret):
        self.left = 2
        if self.where == "reset":
            raise KeyError("no such level")

    def step(self, action):
        self.left -= 1
        if self.where == "step":
            raise OSError("the game is gone")
        return "higher", 0.0, self.left == 0


@pytest.mark.parametrize(
    "where, says",
    [
        ("reset", "the environment Breaks, asked for a new episode, raised KeyError: 'no such"),
        ("step", "the environment Breaks, asked for an answer to '"),
    ],
)
def test_what_an_environment_raises_has_its_place(where, says):
    with pytest.raises(EnvironmentFailed) as failed:
        trainer_of(lambda: Breaks(where)).rollout(SECRETS)
    assert str(failed.value).startswith(says)
    assert f"{__file__}, line " in str(failed.value)
    assert failed.value.__cause__ is not None


def user(text):
    return {"role": "user", "content": text}


# --- calls by name


async def later(a, b=2):
    return a, b


@pytest.mark.parametrize(
    "function, result",
    [
        (lambda: (), ()),
        (lambda a: a, 1),
        (lambda a, other=7: (a, other), (1, 7)),
        (lambda **known: known, {"a": 1, "b": 3, "c": 5}),
        (lambda a, **known: (a, known), (1, {"b": 3, "c": 5})),
        (later, (1, 3)),
    ],
)
def test_a_function_gets_what_it_names_and_a_coroutine_is_awaited(function, result):
    assert call_with_known(function, {"a": 1, "b": 3, "c": 5}) == result
    assert finished_value(later(1)) == (1, 2) and finished_value(7) == 7


# --- tools


class Tools:
    heard = None

    def reset(self, level, seed=None):
        self.heard = level, seed
        return " hello"

    def get_reward(self):
        return 0.5

    def look(self) -> str:
        "Look."
        return "seen"

    def _private(self):
        return ""

    @property
    def size(self):
        return 3


def test_tools_are_the_public_methods_of_the_class():
    tools = Tools()
    tools.extra = print
    assert public_methods(tools) == {"look": tools.look}
    assert [*ToolEnvironment(tools).tools] == ["look"]


@pytest.mark.parametrize(
    "row, heard",
    [
        ({"level": 3, "more": 1}, (3, 11)),
        ({"level": 3, "seed": 5}, (3, 5)),  # the row's own
    ],
)
def test_reset_gets_the_columns_and_the_seed_that_it_names(row, heard):
    environment = ToolEnvironment(Tools())
    assert environment.begin(row, 11) == " hello"
    assert environment.instance.heard == heard
    assert environment.final_reward() == 0.5


def test_a_reset_that_names_no_seed_gets_none():
    class Everything(Tools):
        def reset(self, **row):
            self.heard = row

    environment = ToolEnvironment(Everything())
    assert environment.begin({"level": 3}, 11) is None
    assert environment.instance.heard == {"level": 3}


def test_a_turn_without_a_call_ends_the_episode():
    environment = ToolEnvironment(Tools())
    assert environment.answer(turn("bye")) == Answer([], None, 0, 0)
    answer = environment.answer(turn("", ToolCall("look", {}), ToolCall("_private", {})))
    assert [message["content"] for message in answer.messages] == [
        "seen",
        "{'error': 'Tool _private not found.'}",
    ]
    assert (answer.calls, answer.failures, answer.reward) == (2, 1, None)


@pytest.mark.parametrize("reward, number", [(1, 1.0), (True, 1.0), (torch.tensor(0.5), 0.5)])
def test_an_episodes_reward_is_a_number_and_may_be_awaited(reward, number):
    class Pays(Tools):
        async def get_reward(self):
            return reward

    assert ToolEnvironment(Pays()).final_reward() == number


def test_an_episodes_reward_that_is_no_number_is_named():
    class Pays(Tools):
        def get_reward(self):
            return "much"

    with pytest.raises(ValueError, match=r"get_reward\(\) of Pays is 'much': not a number"):
        ToolEnvironment(Pays()).final_reward()


# --- steps


@pytest.mark.parametrize(
    "first, seen",
    [
        ("a", "a"),
        (("a", {"info": 1}), "a"),
        (SimpleNamespace(observation="a", reward=0.0), "a"),
        ((SimpleNamespace(observation="a"), {}), "a"),
        (None, None),
    ],
)
def test_the_first_observation_of_any_form(first, seen):
    instance = SimpleNamespace(reset=lambda: first, step=None)
    assert StepEnvironment(instance).begin({"prompt": "q"}, 3) == seen


def test_reset_gets_the_row_as_options_and_by_name_and_the_seed():
    heard = {}

    def reset(seed, options, level, own=4):
        heard.update(seed=seed, options=options, level=level, own=own)
        return 7

    environment = StepEnvironment(SimpleNamespace(reset=reset), describe="no {}".format)
    assert environment.begin({"prompt": "q", "level": 2}, 3) == "no 7"
    assert heard == {"seed": 3, "options": {"prompt": "q", "level": 2}, "level": 2, "own": 4}
    environment.begin({"level": 2, "seed": 9}, 3)
    assert heard["seed"] == 9  # the row's own


@pytest.mark.parametrize(
    "result, read",
    [
        (("a", 1, False, False, {}), ("a", 1, False)),
        (("a", 1, True, False, {}), ("a", 1, True)),
        (("a", 1, False, True, {}), ("a", 1, True)),
        (("a", 1, 0, {}), ("a", 1, False)),
        (("a", 1, 1), ("a", 1, True)),
        (SimpleNamespace(observation="a", reward=1, done=1), ("a", 1, True)),
    ],
)
def test_a_step_is_an_observation_a_reward_and_whether_it_is_over(result, read):
    assert step_result(result, None) == read and type(step_result(result, None)[2]) is bool


@pytest.mark.parametrize(
    "result",
    [
        ("a", 1),
        ("a", 1, False, False, {}, {}),
        ["a", 1, False],
        "a",
        None,
        SimpleNamespace(observation="a", reward=1),
        SimpleNamespace(observation="a", done=True),
        SimpleNamespace(reward=1, done=True),
    ],
)
def test_what_is_no_result_of_a_step_is_refused(result):
    with pytest.raises(TypeError, match="step of object returned"):
        step_result(result, object())


@pytest.mark.parametrize(
    "result, answer",
    [
        (("b", 0.5, False), Answer([user("b")], 0.5)),
        (("", 0.5, False), Answer([user("")], 0.5)),
        ((None, 0.5, False), Answer([], 0.5)),  # nothing is to be read
        (("b", 0.5, True), Answer([], 0.5)),
        (("b", None, False), Answer([user("b")], 0.0)),
    ],
)
def test_an_episode_goes_on_where_there_is_something_to_read(result, answer):
    acted = []
    instance = SimpleNamespace(step=lambda action: acted.append(action) or result)
    environment = StepEnvironment(instance, action=str.upper)
    assert environment.answer(turn("go")) == answer and acted == ["GO"]
    assert environment.final_reward() == 0.0


def test_an_observation_is_text():
    assert observation_text(None, 0) is None and observation_text("a", 0) == "a"
    assert observation_of(SimpleNamespace(observation=3)) == 3 and observation_of(4) == 4
    with pytest.raises(TypeError, match="int returned the observation 3: the policy reads text"):
        observation_text(3, 0)


# --- messages


class Talk:
    "The protocol of verifiers. It notes what its methods are given."

    def __init__(self, replies=(), completed=False, **more):
        self.replies = list(replies)
        self.completed = completed
        self.given = []
        vars(self).update(more)

    def is_completed(self, state):
        return self.completed

    def env_response(self, messages, state, prompt, completion, answer, info, task):
        self.given.append((messages, prompt, completion, answer, info, task))
        return self.replies.pop(0)


ROW = {"prompt": "q", "answer": "a", "info": {"x": 1}, "task": "sums"}


def begun(instance, row=ROW):
    environment = MessageEnvironment(instance)
    assert environment.begin(row, 3) is None
    return environment


def test_the_state_of_an_episode_in_which_nothing_has_been_written():
    state = new_state(ROW | {"turn": 9, "more": 2}, [user("q")])
    timing = state.pop("timing")
    assert state == {
        "prompt": [user("q")],
        "answer": "a",
        "info": {"x": 1},
        "task": "sums",
        "more": 2,
        "completion": [],
        "turn": 0,
        "trajectory": [],
        "is_completed": False,
        "is_truncated": False,
        "error": None,
        "final_env_response": None,
        "reward": None,
        "metrics": None,
    }
    assert timing.pop("start_time") > 0 and {*timing.values()} == {0.0}
    bare = new_state({}, [])
    assert (bare["answer"], bare["task"], bare["info"]) == ("", "default", {})


def test_a_conversation_is_handed_over_with_what_stands_beside_it():
    talk = Talk([[user("r")], "s"])
    environment = begun(talk)
    assert environment.answer(turn("x")).messages == [user("r")]
    assert environment.answer(turn("y")).messages == [user("s")]  # a text is the user's
    x, y = ({"role": "assistant", "content": text} for text in "xy")
    assert talk.given == [
        ([user("q"), x], [user("q")], [x], "a", {"x": 1}, "sums"),
        ([user("q"), x, user("r"), y], [user("q")], [x, user("r"), y], "a", {"x": 1}, "sums"),
    ]
    assert environment.state["turn"] == 2
    assert [step["prompt"] for step in environment.state["trajectory"]] == [
        [user("q")],
        [user("q"), x, user("r")],
    ]
    assert [step["completion"] for step in environment.state["trajectory"]] == [[x], [y]]
    assert not any(step["is_truncated"] for step in environment.state["trajectory"])
    assert environment.state["completion"] == environment.messages[1:]


def test_a_prompt_of_messages_stays_and_is_no_part_of_the_completion():
    opening = [{"role": "system", "content": "s"}, user("q")]
    environment = begun(Talk(["r"]), {"prompt": opening})
    environment.answer(turn("x"))
    assert environment.state["prompt"] == opening == environment.messages[:2]
    assert len(environment.state["completion"]) == 2 and len(opening) == 2


def test_calls_of_tools_stand_in_the_message_as_chats_have_them():
    environment = begun(Talk(["r", "s"]))
    environment.answer(turn("", ToolCall("add", {"a": 1})))
    environment.answer(turn("x"))
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert environment.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "tool_calls" not in environment.messages[3]
    assert tool_call_message(ToolCall("f", {}))["function"] == {"name": "f", "arguments": "{}"}


def test_a_completed_episode_is_not_answered():
    talk = Talk(completed=True)
    assert begun(talk).answer(turn("x")) == Answer([]) and talk.given == []


def test_an_environment_may_make_the_state_and_return_it():
    def setup_state(state):
        return {**state, "own": 1}

    def env_response(messages, state):
        return [user("r")], {**state, "later": 2}

    environment = begun(Talk(setup_state=setup_state, env_response=env_response))
    assert environment.state["own"] == 1
    assert environment.answer(turn("x")).messages == [user("r")]
    assert environment.state["later"] == 2
    in_place = begun(Talk(setup_state=lambda state: state.update(own=1)))
    assert in_place.state["own"] == 1


@pytest.mark.parametrize("final, goes_on", [(None, True), ([user("end")], False), ([], False)])
def test_a_final_reply_ends_the_episode(final, goes_on):
    talk = Talk(["r"])
    environment = begun(talk)
    environment.state["final_env_response"] = final
    assert environment.answer(turn("x")).messages == ([user("r")] if goes_on else [])
    assert environment.messages[-1] == user("r")  # the rubric reads it


def test_an_early_version_is_asked_again_behind_its_reply():
    def is_completed(messages, state):
        return messages[-1]["content"] == "right"

    talk = Talk(["wrong", "right"], is_completed=is_completed)
    environment = begun(talk)
    environment.state["final_env_response"] = "of later versions"
    assert environment.answer(turn("x")).messages == [user("wrong")]
    assert environment.answer(turn("y")).messages == []


@pytest.mark.parametrize(
    "score, reward",
    [
        (lambda state: state.update(reward=2.0), 2.0),
        (lambda state: {"reward": 3.0}, 3.0),
        (lambda state: SimpleNamespace(reward=4.0), 4.0),
        (lambda state: state.update(reward=0.0), 0.0),
        (lambda state, score_sem, task: {"reward": len(task)}, 4.0),
    ],
)
def test_a_rubric_scores_the_episode(score, reward):
    environment = begun(Talk(rubric=SimpleNamespace(score_rollout=score)))
    assert environment.final_reward() == reward
    assert begun(Talk()).final_reward() is None
    assert begun(Talk(rubric=None)).final_reward() is None


# --- which protocol


def methods(*names):
    return SimpleNamespace(**dict.fromkeys(names, print))


@pytest.mark.parametrize(
    "instance, kind",
    [
        (methods("reset", "step"), StepEnvironment),
        (methods("reset"), ToolEnvironment),
        (methods("reset", "step", "get_reward"), ToolEnvironment),
        (methods("reset", "get_reward"), ToolEnvironment),
        (methods("env_response", "reset", "step"), MessageEnvironment),
        (methods("begin", "answer", "final_reward", "env_response"), SimpleNamespace),
    ],
)
def test_methods_tell_the_protocol(instance, kind):
    assert type(adapt_environment(instance)) is kind


@pytest.mark.parametrize(
    "instance", [methods("step"), SimpleNamespace(reset=3), 3, methods("begin")]
)
def test_an_object_of_no_protocol_is_refused(instance):
    with pytest.raises(TypeError, match="is no environment"):
        adapt_environment(instance)


# --- turns and replies


@pytest.mark.parametrize(
    "text, calls",
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [ToolCall("f", {"a": 1})]),
        ('<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>', [ToolCall("f", {})]),
        ('<tool_call>{"name": 3}</tool_call>', [ToolCall("3", {})]),
        ('<tool_call>{"name": "f"}</tool_call> <tool_call>3</tool_call>', []),
        ("none", []),
    ],
)
def test_calls_are_json_between_marks(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.fixture
def reader():
    "A tokenizer that reads its own calls, and notes what it is given."
    tokenizer = tiny_smollm(["x", "y"])[1]
    tokenizer.response_template = "its own"
    tokenizer.given = []
    return tokenizer


@pytest.mark.parametrize(
    "parsed, calls",
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            [ToolCall("f", {"a": 1})],
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": None}}]}, [ToolCall("f", {})]),
        ({"tool_calls": None}, []),
        ({}, []),
        ({"tool_calls": [{"function": {}}]}, []),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, []),
        (None, []),
    ],
)
@pytest.mark.parametrize("tools", [(), (print,)])
def test_a_tokenizer_with_a_template_for_responses_reads_them(parsed, calls, tools, reader):
    def parse_response(ids, prefix, tools):
        reader.given.append((ids, prefix, tools))
        if parsed is None:
            raise ValueError("it cannot be read")
        return parsed

    reader.parse_response = parse_response
    ids = reader("x y")["input_ids"]
    assert parse_turn(reader, (*ids, reader.eos_token_id), (5, 6), tools) == Turn("x y", calls)
    assert reader.given == [([*ids, reader.eos_token_id], [5, 6], list(tools) or None)]


def test_a_turn_is_its_text_without_special_tokens_and_its_calls_with_them():
    words = ["<tool_call>", '{"name":"f"}', "</tool_call>"]
    tokenizer = word_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = tokenizer.convert_tokens_to_ids(words)
    assert parse_turn(tokenizer, ids, []) == Turn('{"name":"f"}', [ToolCall("f", {})])


@pytest.mark.parametrize(
    "prompt, row",
    [
        ("q", {"prompt": "q"}),
        ([user("q")], {"prompt": [user("q")]}),
        ({"prompt": "q", "x": 1}, {"prompt": "q", "x": 1}),
    ],
)
def test_a_prompt_is_a_row(prompt, row):
    made = prompt_row(prompt, 2)
    assert made == row and made is not prompt


@pytest.mark.parametrize("prompt", [[3, 4], {"prompt": [3, 4]}])
def test_a_prompt_of_token_ids_is_refused_by_its_number(prompt):
    with pytest.raises(TypeError, match="prompt 2 is token ids, and an environment reads text"):
        prompt_row(prompt, 2)


TWO_TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}]


@pytest.mark.parametrize(
    "prompt, said, made",
    [
        ("q", None, "q"),
        ("q", " o", "q o"),
        (TWO_TURNS, None, TWO_TURNS),
        (TWO_TURNS, " o", [TWO_TURNS[0], {**TWO_TURNS[1], "content": "q o"}]),
    ],
)
def test_what_an_environment_says_first_stands_behind_the_prompt(prompt, said, made):
    row = {"prompt": prompt, "x": 1}
    assert with_observation(row, said) == {"prompt": made, "x": 1}
    assert TWO_TURNS[1]["content"] == "q" and row["prompt"] is prompt


def test_replies_are_written_as_the_chat_template_does_and_end_an_open_turn():
    tokenizer = tiny_smollm(["x"])[1]
    replies = [{"role": "tool", "content": "x"}, user("y")]
    closed = reply_text(replies, tokenizer, True)
    assert closed.endswith("<|im_start|>assistant ") and "tool x" in closed
    assert reply_text(replies, tokenizer, False) == "<|im_end|>" + closed
    tokenizer.chat_template = None
    for is_ended in (False, True):
        assert reply_text(replies, tokenizer, is_ended) == "x\ny"


def test_what_was_paid_stands_at_its_tokens():
    episodes = [Episode([5], rewards=[1.0, 0.0, 2.0]), Episode([5], rewards=[3.0])]
    mask = torch.tensor([[True, True, True], [True, False, False]])
    table = reward_table(episodes, mask)
    assert table.tolist() == [[1, 0, 2], [3, 0, 0]]
    assert environment_reward(environment_rewards=[[1.0], [2.0]]) == [[1.0], [2.0]]


# --- failures


def test_what_a_users_environment_raises_has_its_place():
    says = "the environment Tools, asked for a move, raised KeyError: 'no such level'"
    with pytest.raises(EnvironmentFailed, match=says) as failed:
        with explain_failure(ToolEnvironment(Tools()), "a move"):
            raise KeyError("no such level")
    assert f"{__file__}, line " in str(failed.value)
