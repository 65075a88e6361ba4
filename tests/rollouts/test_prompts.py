"Prompts in every form, the tokens that end a response, and the order of the prompts."

import itertools

import pytest
import torch
from small_trainer import EOS, PROMPTS, TOKENIZER, config, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.long_rows import RowsTooLong
from instruct_goose.models.tokens import PromptDataset, pad, word_tokenizer
from instruct_goose.rollouts.prompts import PromptOrder, encode_rows, model_eos_ids
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.training.trainer import RLHFTrainer


def test_prompts_in_any_form_give_the_same_rollout():
    dataset = PromptDataset(PROMPTS, TOKENIZER)
    ids = [TOKENIZER(p)["input_ids"] for p in PROMPTS]
    left = dict(zip(("query_ids", "query_mask"), pad(ids, EOS, side="left"), strict=True))
    right = dict(zip(("query_ids", "query_mask"), pad(ids, EOS, side="right"), strict=True))
    forms = (
        PROMPTS,
        tuple(PROMPTS),
        ids,
        [torch.tensor(i) for i in ids],
        [dataset[i] for i in range(8)],
        dataset.collate([dataset[i] for i in range(8)]),
        left,
        right,
    )

    def rollout_texts(prompts):
        trainer = RLHFTrainer(tiny(), config=config(), tokenizer=TOKENIZER)
        return trainer.rollout(prompts).texts

    expected = rollout_texts(PROMPTS)
    for prompts in forms:
        assert rollout_texts(prompts) == expected


def test_every_pass_shows_every_prompt_once_in_a_new_order():
    order = PromptOrder(seed=3)
    order.open(PROMPTS)
    taken = [prompt for _ in range(16) for prompt in order.take(3)]
    passes = [taken[i : i + 8] for i in range(0, 48, 8)]
    assert all(sorted(one_pass) == sorted(PROMPTS) for one_pass in passes)
    assert len({tuple(one_pass) for one_pass in passes}) > 4
    assert order.seen == 48


def test_the_number_of_prompts_seen_is_all_that_a_resumed_run_has_to_know():
    order, resumed, other_seed = PromptOrder(3), PromptOrder(3), PromptOrder(1)
    resumed.load_state_dict({"seen": 9})
    for each in (order, resumed, other_seed):
        each.open(PROMPTS)
    taken = order.take(12)
    assert resumed.take(3) == taken[9:]
    assert other_seed.take(8) != taken[:8]


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
    with pytest.raises(TypeError, match="one string"):
        trainer.train("w1", spy, steps=1, progress=False)


def test_the_ends_of_tokenizer_model_and_caller_are_one_set():
    """As of Qwen's chat models: the tokenizer ends a text, the generation config lists the end of a
    turn as well, and each of them ends a response."""
    turn, own = TOKENIZER.convert_tokens_to_ids(["w3", "w5"])
    ends = {EOS, turn, own}
    model = tiny()
    model.generation_config.eos_token_id = [turn, EOS]
    trainer = RLHFTrainer(
        model, config=config(batch_size=64), tokenizer=TOKENIZER, stop_token_ids=[own, turn]
    )
    assert sorted(trainer.eos_ids) == sorted(ends)
    r = trainer.rollout(PROMPTS * 16)
    last = [ids[mask][-1].item() for ids, mask in zip(r.response_ids, r.mask, strict=True)]
    is_end = torch.isin(r.response_ids, torch.tensor(sorted(ends))) & r.mask
    assert ends <= set(last)  # each of them ends some
    assert (is_end.sum(-1) <= 1).all()  # and nothing is written behind an end
    assert [token in ends for token in last] == is_end.any(-1).tolist()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("place", ["config", "generation_config"])
def test_one_end_of_the_model_counts_as_a_list_of_one_does(place, as_list):
    turn = TOKENIZER.convert_tokens_to_ids("w3")
    model = tiny()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    getattr(model, place).eos_token_id = [turn] if as_list else turn
    assert RLHFTrainer(model, config=config(), tokenizer=TOKENIZER).eos_ids == [EOS, turn]
    assert RLHFTrainer(model, config=config()).eos_ids == [turn]


def test_the_default_of_a_config_class_is_no_end_where_the_tokenizer_has_a_word_there():
    words = word_tokenizer(["the", "film"], pad="<eos>", bos="<eos>")
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape))
    assert model.config.eos_token_id == 2
    assert words.convert_ids_to_tokens(2) == "the"
    assert model_eos_ids(model, words) == [words.eos_token_id]


LONG = ["w1 " * 16, "w2", "w3 " * 15, "w4 w5", {"prompt": "w6", "right": "x"}]


class Seen:
    "A reward function that remembers the first word of each text."

    def __init__(self):
        self.words = []

    def __call__(self, texts):
        self.words += [text.split()[0] for text in texts]
        return [0.0] * len(texts)


def trainer_for_long_prompts(**settings):
    return RLHFTrainer(tiny(), config=config(**settings), tokenizer=TOKENIZER)


def test_long_prompts_are_counted_and_refused_before_the_first_iteration():
    seen = Seen()
    message = (
        "2 of 5 prompts are beyond the room for prompts of 14 tokens: prompt 0 has 17 tokens.*"
        "long_rows='cut'"
    )
    with pytest.raises(ValueError, match=message):
        trainer_for_long_prompts().train(LONG, seen, steps=1, progress=False)
    assert not seen.words


@pytest.mark.parametrize(
    "how, message, words",
    [
        ("cut", "2 of 5.*2 cut", {"w1", "w2", "w3", "w4", "w6"}),
        ("drop", "2 of 5.*2 left out", {"w2", "w4", "w6"}),
    ],
)
def test_long_prompts_are_cut_or_dropped(how, message, words):
    seen = Seen()
    trainer = trainer_for_long_prompts(long_rows=how, steps=2)
    with pytest.warns(RowsTooLong, match=message):
        trainer.train(LONG, seen, progress=False, held_out=["w7"])
    assert set(seen.words) == words


def test_long_prompts_of_a_stream_are_dropped_as_they_come():
    seen = Seen()
    trainer = trainer_for_long_prompts(long_rows="drop", batch_size=3, minibatches=1)
    trainer.train(iter(LONG), seen, steps=1, progress=False)
    assert seen.words == ["w2", "w4", "w6"]


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


@pytest.mark.parametrize(
    "columns", [{"prompt": ["w1", "w2"]}, {"query_ids": torch.ones(2, 1), "query_mask": None}]
)
def test_training_refuses_a_dictionary_of_columns_by_their_names(columns):
    with pytest.raises(TypeError, match=f"dictionary of .*{next(iter(columns))}.*pass a list"):
        PromptOrder(seed=0).open(columns)


def test_a_question_that_the_template_drops_is_refused_by_its_number():
    _, tokenizer = tiny_smollm(["one"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}{{ '<|im_start|>' }}"
    )
    rows = [[{"role": role, "content": "one"}] for role in ("user", "human")]
    with pytest.raises(ValueError, match="prompt 1: .*leaves out what turn 0 .human"):
        encode_rows(rows, Tokens(tokenizer, [], 0))


def test_template_arguments_are_a_setting_and_a_rows_own_win():
    _, tokenizer = tiny_smollm(["film", "think", "quiet"])
    tokenizer.chat_template = tokenizer.chat_template + "{{ mood or '' }}"
    question = [{"role": "user", "content": "film"}]
    rows = [
        {"prompt": question},
        {"prompt": question, "chat_template_kwargs": {"mood": "think"}},
    ]
    model, _ = tiny_smollm(["film", "think", "quiet"])
    trainer = RLHFTrainer(
        model, config=config(template_kwargs='{"mood": "quiet"}'), tokenizer=tokenizer
    )
    batch = trainer.encode(rows)
    written = [tokenizer.decode(ids[mask]) for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    assert [text.split()[-1] for text in written] == ["quiet", "think"]
    with pytest.raises(ValueError, match="template_kwargs is .* an object in JSON"):
        config(template_kwargs="mood")
