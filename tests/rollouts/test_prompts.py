"Prompts in every form, the tokens that end a response, and the order of the prompts."

import itertools

import pytest
import torch
from small_trainer import EOS, PROMPTS, TOKENIZER, config, tiny

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import PromptDataset, pad, word_tokenizer
from instruct_goose.rollouts.prompts import LongPrompts, PromptOrder, encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.training.trainer import RLHFTrainer


def test_prompts_in_any_form_give_the_same_rollout():
    dataset = PromptDataset(PROMPTS, TOKENIZER)
    ids = [TOKENIZER(p)["input_ids"] for p in PROMPTS]
    left, right = (
        {k: v for k, v in zip(("query_ids", "query_mask"), pad(ids, EOS, side=side), strict=True)}
        for side in ("left", "right")
    )
    texts = None
    for prompts in (
        PROMPTS,
        tuple(PROMPTS),
        ids,
        [torch.tensor(i) for i in ids],
        [dataset[i] for i in range(8)],
        dataset.collate([dataset[i] for i in range(8)]),
        left,
        right,
    ):
        got = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER).rollout(prompts).texts
        texts = texts or got
        assert got == texts


def test_every_pass_shows_every_prompt_once_in_a_new_order():
    trainer = RLHFTrainer(tiny(), config=config(batch_size=3, minibatches=1), tokenizer=TOKENIZER)
    seen, trainer.fresh = [], PromptOrder(PROMPTS, trainer.config.seed)
    while len(seen) < 48:
        seen += trainer.next_prompts(3)
    passes = [seen[i : i + 8] for i in range(0, 48, 8)]
    assert (
        all(sorted(p) == sorted(PROMPTS) for p in passes)
        and len({tuple(p) for p in passes}) > 4
        and trainer.prompts_seen == 48
    )
    assert (
        PromptOrder(PROMPTS, trainer.config.seed).take(9, 3) == seen[9:12]
    )  # the place is all there is to remember
    assert PromptOrder(PROMPTS, 1).take(0, 8) != passes[0]


def test_a_stream_is_read_in_order_and_may_run_out():
    trainer = RLHFTrainer(tiny(), config=config(batch_size=4), tokenizer=TOKENIZER)
    seen = []

    def spy(texts):
        seen.extend(t.split()[0] for t in texts)
        return [0.0] * len(texts)

    trainer.train((f"w{i % 9}" for i in itertools.count()), spy, steps=2, progress=False)
    assert seen == [f"w{i}" for i in range(8)]
    with pytest.raises(ValueError, match="ran out in iteration 4"):
        trainer.train(iter(["w1"] * 8), spy, steps=3, progress=False)
    with pytest.raises(ValueError, match="no prompts"):
        trainer.train([], spy, steps=1, progress=False)
    with pytest.raises(TypeError, match="one text"):
        trainer.train("w1", spy, steps=1, progress=False)


def test_the_ends_of_tokenizer_model_and_caller_are_one_set():
    "As of Qwen's chat models: the tokenizer ends a text, the generation config lists the end of a turn as well, and each of them ends a response."
    turn, own = TOKENIZER.convert_tokens_to_ids(["w3", "w5"])
    model = tiny()
    model.generation_config.eos_token_id = [turn, EOS]
    trainer = RLHFTrainer(
        model, config=config(batch_size=64), tokenizer=TOKENIZER, stop_token_ids=[own, turn]
    )
    assert sorted(trainer.eos_ids) == sorted({EOS, turn, own}) and len(trainer.eos_ids) == 3
    r = trainer.rollout(PROMPTS * 16)
    last = [row[m][-1].item() for row, m in zip(r.response_ids, r.mask)]
    inside = torch.isin(r.response_ids, torch.tensor([EOS, turn, own])) & r.mask
    assert {EOS, turn, own} <= set(last) and (
        inside.sum(-1) <= 1
    ).all()  # each ends some, and nothing is written behind an end
    assert all((x in (EOS, turn, own)) == bool(end) for x, end in zip(last, inside.any(-1)))
    plain = tiny()
    plain.generation_config.eos_token_id = (
        turn  # one number may be the default of a class: the tokenizer is asked
    )
    assert RLHFTrainer(plain, config=config(), tokenizer=TOKENIZER).eos_ids == [EOS]
    assert RLHFTrainer(plain, config=config()).eos_ids == [turn]


LONG = ["w1 " * 16, "w2", "w3 " * 15, "w4 w5", {"prompt": "w6", "right": "x"}]


def test_prompts_that_are_too_long_are_counted_and_refused_cut_or_dropped():
    seen = []

    def spy(texts):
        seen.extend(texts)
        return [0.0] * len(texts)

    t = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
    with pytest.raises(
        ValueError,
        match="2 of 5 prompts leave no room for a response: prompt 0 has 17 tokens, the limit is 14.*long_prompts",
    ):
        t.train(LONG, spy, steps=1, progress=False)
    assert not seen  # before the first iteration
    for how, says, words in (
        ("cut", "2 of 5.*Their ends stay", {1, 2, 3, 4, 6}),
        ("drop", "2 of 5.*left out", {2, 4, 6}),
    ):
        t = RLHFTrainer(tiny(), config=config(long_prompts=how, steps=2), tokenizer=TOKENIZER)
        with pytest.warns(LongPrompts, match=says):
            t.train(LONG, spy, progress=False, held_out=["w7"])
        assert {text.split()[0] for text in seen} == {f"w{i}" for i in words}
        seen.clear()
    t = RLHFTrainer(
        tiny(), config=config(long_prompts="drop", batch_size=3, minibatches=1), tokenizer=TOKENIZER
    )
    t.train(iter(LONG), spy, steps=1, progress=False)  # of a stream as they come
    assert [text.split()[0] for text in seen[-3:]] == ["w2", "w4", "w6"]


def encoded(tokenizer, row):
    "The ids that a policy is given for one row."
    return encode_rows([row], Tokens(tokenizer, [], 0))[0]


def test_a_text_that_begins_with_the_bos_token_gets_no_second_one():
    tokenizer = word_tokenizer(["the", "film"])
    assert encoded(tokenizer, "<bos> the film") == tokenizer("the film")["input_ids"]


def test_a_prompt_does_not_end_with_the_end_that_its_tokenizer_adds():
    tokenizer = word_tokenizer(["the", "film"], add_eos=True)
    assert encoded(tokenizer, "the film") == tokenizer("the film")["input_ids"][:-1]


def test_the_templates_arguments_come_from_the_rows_columns():
    _, tokenizer = tiny_smollm(["weather", "tools:", "one", "good"])
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ 'tools: ' + t['function']['name'] + ' ' }}{% endfor %}"
        "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}{{ mood or '' }}"
    )
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompt = [{"role": "user", "content": "one"}]

    row = {"prompt": prompt, "tools": tools, "chat_template_kwargs": {"mood": "good"}}

    assert tokenizer.decode(encoded(tokenizer, row)) == "tools: weather one good"
    assert tokenizer.decode(encoded(tokenizer, {"prompt": prompt})) == "one"


def test_a_question_that_the_template_drops_is_refused_by_its_number():
    _, tokenizer = tiny_smollm(["one"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}{{ '<|im_start|>' }}"
    )
    rows = [[{"role": role, "content": "one"}] for role in ("user", "human")]
    with pytest.raises(ValueError, match="prompt 1: .*leaves out what turn 0 .human"):
        encode_rows(rows, Tokens(tokenizer, [], 0))
