"""One renderer: RL, SFT, DPO, KTO, reward models, `sample` and `chat` read a row as the same ids.

For every chat template at hand, and in the models of thirty families: what is compared are the ids
that reach the model's embedding.
"""

import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers as T
from templates import FAMILIES, tokenizer_of
from transformers import AutoModelForCausalLM

from instruct_goose.cli.commands import ChatConfig, SampleConfig, responses_of, stream_answer
from instruct_goose.config import RLHFConfig
from instruct_goose.data.files import BadRow
from instruct_goose.models.reward_model import RewardModel
from instruct_goose.models.tokens import PairDataset, word_tokenizer
from instruct_goose.recipes.inputs import (
    SAMPLE,
    read_demos,
    read_preferences,
    read_prompts,
    try_reward,
)
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.supervised.dpo import labelled_rows, pair_rows
from instruct_goose.supervised.sft import lm_rows, train_lm
from instruct_goose.training.trainer import RLHFTrainer

TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
QUESTION = [{"role": "user", "content": "what is it?"}]
TEXT = "what is it?"
ROTARY = dict(intermediate_size=24, num_key_value_heads=1)
DEMO = {"prompt": QUESTION, "completion": "the film was good"}
THUMBS = [{**DEMO, "label": True}, {**DEMO, "completion": "why?", "label": False}]
PAIR = {"prompt": QUESTION, "chosen": "the film was good", "rejected": "why?"}


@contextmanager
def ids_read_by(model):
    "Remember the rows of ids that reach the embedding inside the block."
    seen = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, given, __: seen.extend(given[0].tolist()))
    try:
        yield seen
    finally:
        hook.remove()


def sampled_prompt(model, tokenizer, text, chat):
    "The ids that `sample` lets a model read first."
    config = SampleConfig(Path("nowhere"), max_new_tokens=1, chat=chat)
    with ids_read_by(model) as seen:
        responses_of(model, tokenizer, [text], config)
    return seen[0]


def chatted_prompt(model, tokenizer, messages):
    "The ids that `chat` lets a model read first."
    with ids_read_by(model) as seen:
        stream_answer(model, tokenizer, messages, ChatConfig(Path("nowhere"), max_new_tokens=1))
    return seen[0]


def asked_in_rl(model, tokenizer, prompt):
    "The ids that a trainer lets its policy go on from, and those that the policy read first."
    config = RLHFConfig.preset("grpo", device="cpu", batch_size=2, group_size=2, max_new_tokens=1)
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)
    with ids_read_by(model) as seen:
        rollout = trainer.rollout([prompt])
    assert rollout.query_mask.all()
    assert seen[0] == rollout.query_ids[0].tolist()
    return seen[0]


def tiny(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def shape_for(tokenizer):
    "What the configurations of all families have, under transformers' common names."
    return dict(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def templates_own(tokenizer, messages):
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_stage_reads_the_templates_own_prompt(name):
    tokenizer = TOKENIZERS[name]
    asked = templates_own(tokenizer, QUESTION)

    prompts = encode_rows(read_prompts([{"prompt": QUESTION}], tokenizer), Tokens(tokenizer, [], 0))
    rows, (start,) = lm_rows(read_demos([DEMO], tokenizer), tokenizer)
    pair = read_preferences([PAIR], tokenizer)
    ((chosen, rejected),) = pair_rows(pair, tokenizer)
    thumbs, _ = labelled_rows(THUMBS, tokenizer)
    scored = PairDataset(pair, tokenizer)[0]

    assert prompts == [asked]
    assert rows[0][:start] == chosen[0] == rejected[0] == thumbs[0][0] == thumbs[1][0] == asked
    assert rows[0] == chosen[0] + chosen[1] == thumbs[0][0] + thumbs[0][1] == scored["chosen"]
    assert rejected[0] + rejected[1] == thumbs[1][0] + thumbs[1][1] == scored["rejected"]
    assert "the film was good" in tokenizer.decode(rows[0][start:])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_stage_reads_a_plain_text_as_the_tokenizers_call_gives_it(name):
    tokenizer = TOKENIZERS[name]
    asked = tokenizer(TEXT)["input_ids"]
    row = {"prompt": TEXT, "completion": " the film"}
    pair = {"prompt": TEXT, "chosen": " the film", "rejected": " why?"}

    rows, (start,) = lm_rows([row], tokenizer)
    ((chosen, rejected),) = pair_rows([pair], tokenizer)
    scored = PairDataset([pair], tokenizer)[0]

    assert encode_rows([TEXT], Tokens(tokenizer, [], 0)) == [asked]
    assert rows[0][:start] == chosen[0] == rejected[0] == asked
    assert rows[0] == [*tokenizer(f"{TEXT} the film")["input_ids"], tokenizer.eos_token_id]
    assert scored["chosen"] == tokenizer(f"{TEXT} the film")["input_ids"]


WRITES_BOS = {
    name
    for name, tokenizer in TOKENIZERS.items()
    if templates_own(tokenizer, QUESTION)[0] == tokenizer.bos_token_id
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_a_template_has_written_is_read_alike_when_it_is_given_as_text(name):
    "No second bos where the template writes it; where only the tokenizer does, it writes one."
    tokenizer = TOKENIZERS[name]
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    asked = templates_own(tokenizer, QUESTION)
    if FAMILIES[name].adds_bos and name not in WRITES_BOS:
        asked = [tokenizer.bos_token_id, *asked]

    rows, (start,) = lm_rows([{"prompt": text, "completion": "the film"}], tokenizer)
    pair = {"prompt": text, "chosen": "the film", "rejected": "why?"}

    assert encode_rows([text], Tokens(tokenizer, [], 0)) == [asked]
    assert rows[0][:start] == asked
    assert rows[0].count(tokenizer.bos_token_id) == asked.count(tokenizer.bos_token_id) + (
        tokenizer.bos_token_id == tokenizer.eos_token_id
    )
    assert [given for given, _ in pair_rows([pair], tokenizer)[0]] == [asked, asked]
    assert PairDataset([pair], tokenizer)[0]["chosen"][: len(asked)] == asked


@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_a_prompt_has_no_end_in_rl_sample_or_training_whatever_the_tokenizer_adds(add_bos, add_eos):
    tokenizer = word_tokenizer("what is it why".split(), 64, add_bos=add_bos, add_eos=add_eos)
    model = tiny(T.LlamaConfig(**shape_for(tokenizer), **ROTARY))
    asked = tokenizer.convert_tokens_to_ids(["what", "is"])
    if add_bos:
        asked = [tokenizer.bos_token_id, *asked]

    rows, (start,) = lm_rows([{"prompt": "what is", "completion": " it"}], tokenizer)
    pair = {"prompt": "what is", "chosen": " it", "rejected": " why"}

    assert asked_in_rl(model, tokenizer, "what is") == asked
    assert sampled_prompt(model, tokenizer, "what is", chat=False) == asked
    assert rows[0][:start] == pair_rows([pair], tokenizer)[0][0][0] == asked
    assert PairDataset([pair], tokenizer)[0]["chosen"] == tokenizer("what is it")["input_ids"]


def judge_of(tokenizer):
    "A reward model whose score depends on every token."
    judge = RewardModel.from_causal_lm(
        tiny(T.LlamaConfig(**shape_for(tokenizer), **ROTARY)), tokenizer
    )
    torch.nn.init.normal_(judge.model.score.weight)
    return judge.eval()


@pytest.mark.parametrize("name", TOKENIZERS)
@torch.no_grad()
def test_a_reward_model_reads_in_rl_and_in_the_trial_what_it_would_be_trained_on(name):
    """The policy's ids, where the tokenizers are the same. With a template of its own, as an answer
    of its own: decoded texts, in which no mark says who speaks, would score otherwise."""
    tokenizer = TOKENIZERS[name]
    judge = judge_of(tokenizer)
    config = RLHFConfig.preset("grpo", device="cpu", batch_size=4, group_size=4, max_new_tokens=3)
    model = tiny(T.LlamaConfig(**shape_for(tokenizer), **ROTARY))
    trainer = RLHFTrainer(model, config=config, tokenizer=tokenizer)

    rollout = trainer.score(trainer.rollout([QUESTION]), judge)

    rows = [
        torch.cat([query[given], response[written]])
        for query, given, response, written in zip(
            rollout.query_ids,
            rollout.query_mask,
            rollout.response_ids,
            rollout.mask,
            strict=True,
        )
    ]
    alone = [judge(row[None]).item() for row in rows]
    assert rollout.scores.tolist() == pytest.approx(alone, abs=1e-4)
    trial = try_reward([judge], [{"prompt": QUESTION}], tokenizer)
    sample = [
        *templates_own(tokenizer, QUESTION),
        *tokenizer(SAMPLE, add_special_tokens=False).input_ids,
    ]
    assert trial == pytest.approx([judge(torch.tensor([sample])).item()], abs=1e-4)

    other = copy.deepcopy(TOKENIZERS["Qwen3" if name == "ChatML" else "ChatML"])
    trial = try_reward([judge], [{"prompt": QUESTION}], other)
    pair = {"prompt": QUESTION, "chosen": SAMPLE, "rejected": "why?"}
    trained = PairDataset([pair], tokenizer)[0]["chosen"]
    assert trial == pytest.approx([judge(torch.tensor([trained])).item()], abs=1e-4)


@pytest.mark.parametrize("name", ["R1", "Nemotron", "Qwen3"])
def test_pairs_that_differ_in_the_thought_alone_are_no_ties(name):
    tokenizer = TOKENIZERS[name]
    thoughts = [f"<think>\n{thought}\n</think>\n\ngood" for thought in ("why?", "it is")]
    pair = {"prompt": QUESTION, "chosen": thoughts[0], "rejected": thoughts[1]}

    ((chosen, rejected),) = pair_rows(read_preferences([pair], tokenizer), tokenizer)
    scored = PairDataset([pair], tokenizer)[0]

    assert "why?" in tokenizer.decode(chosen[1]) and "it is" in tokenizer.decode(rejected[1])
    assert scored["chosen"] == chosen[0] + chosen[1] != rejected[0] + rejected[1]


@pytest.mark.parametrize("read", [read_prompts, read_demos, read_preferences])
@pytest.mark.parametrize("name", ["Phi-3", "R1", "Nemotron", "gpt-oss", "GLM"])
def test_a_role_that_a_template_drops_is_refused_by_its_row_in_every_stage(name, read):
    unknown = [{"role": "human", "content": "what is it?"}]
    answers = {"completion": "good", "chosen": "good", "rejected": "why?"}
    rows = [{"prompt": QUESTION} | answers, {"prompt": unknown} | answers]
    with pytest.raises(BadRow, match="row 1: .*leaves out what turn 0 .human. says"):
        read(rows, TOKENIZERS[name])


FOUR = [("what is it", "good"), ("why", "the film"), ("who is in it", "4"), ("what", "it is")]


@pytest.mark.parametrize("name", ["ChatML", "R1", "Nemotron", "GLM"])
def test_a_model_answers_what_it_was_taught_behind_the_prompt_that_it_is_asked_with(name):
    "Also where the generation prompt opens a thought that the conversation does not have there."
    tokenizer = TOKENIZERS[name]
    shape = shape_for(tokenizer) | dict(hidden_size=48, num_attention_heads=4)
    model = tiny(T.LlamaConfig(**shape, intermediate_size=96))
    demos = [
        {"prompt": [{"role": "user", "content": question}], "completion": answer}
        for question, answer in FOUR
    ]
    train_lm(model, tokenizer, demos, steps=120, lr=1e-2, batch_size=4, progress=False)

    config = SampleConfig(Path("nowhere"), chat=True, max_new_tokens=24, temperature=0.01)
    answers = responses_of(model.eval(), tokenizer, [question for question, _ in FOUR], config)

    assert [text.rpartition("</think>")[2].strip() for text in answers] == [
        answer for _, answer in FOUR
    ]


# A policy's prompt in RL, what it is taught behind, and what the shell lets it read.
HEADS = dict(intermediate_size=24, num_key_value_heads=2)
CONFIGS = {
    "apertus": lambda b: T.ApertusConfig(**b, **ROTARY),
    "arcee": lambda b: T.ArceeConfig(**b, **ROTARY),
    "bigcode": lambda b: T.GPTBigCodeConfig(**b),
    "biogpt": lambda b: T.BioGptConfig(**b, intermediate_size=24),
    "bloom": lambda b: T.BloomConfig(**b),
    "codegen": lambda b: T.CodeGenConfig(**b | dict(num_attention_heads=4), rotary_dim=4),
    "cohere": lambda b: T.CohereConfig(**b, **ROTARY),
    "cohere2": lambda b: T.Cohere2Config(**b, **ROTARY),
    "ernie4_5": lambda b: T.Ernie4_5Config(**b, **ROTARY, head_dim=8),
    "exaone4": lambda b: T.Exaone4Config(**b, **ROTARY),
    "falcon": lambda b: T.FalconConfig(**b),
    "gemma": lambda b: T.GemmaConfig(**b, **ROTARY, head_dim=8),
    "gemma2": lambda b: T.Gemma2Config(**b, **ROTARY, head_dim=8),
    "gemma3": lambda b: T.Gemma3TextConfig(**b, **ROTARY, head_dim=8),
    "glm": lambda b: T.GlmConfig(**b, **ROTARY, head_dim=8),
    "glm4": lambda b: T.Glm4Config(**b, **ROTARY, head_dim=8),
    "gpt2": lambda b: T.GPT2Config(**b),
    "gpt_neo": lambda b: T.GPTNeoConfig(**b, attention_types=[[["global"], 2]]),
    "gpt_neox": lambda b: T.GPTNeoXConfig(**b, intermediate_size=24),
    "gpt_oss": lambda b: T.GptOssConfig(
        **b, **ROTARY, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "gptj": lambda b: T.GPTJConfig(**b, rotary_dim=4),
    "granite": lambda b: T.GraniteConfig(**b, **ROTARY),
    "granitemoe": lambda b: T.GraniteMoeConfig(**b, **ROTARY, num_local_experts=2),
    "helium": lambda b: T.HeliumConfig(**b, **HEADS, head_dim=8),
    "llama": lambda b: T.LlamaConfig(**b, **ROTARY),
    "mistral": lambda b: T.MistralConfig(**b, **ROTARY),
    "mixtral": lambda b: T.MixtralConfig(**b, **ROTARY, num_local_experts=2),
    "mpt": lambda b: T.MptConfig(**b),
    "nemotron": lambda b: T.NemotronConfig(**b, **ROTARY, head_dim=8),
    "olmo": lambda b: T.OlmoConfig(**b, **ROTARY),
    "olmo2": lambda b: T.Olmo2Config(**b, **ROTARY),
    "olmoe": lambda b: T.OlmoeConfig(**b, **ROTARY, num_experts=2, num_experts_per_tok=1),
    "opt": lambda b: T.OPTConfig(**b, ffn_dim=24, word_embed_proj_dim=16),
    "persimmon": lambda b: T.PersimmonConfig(**b, intermediate_size=24),
    "phi": lambda b: T.PhiConfig(**b, **ROTARY),
    "phi3": lambda b: T.Phi3Config(**b, **ROTARY),
    "qwen2": lambda b: T.Qwen2Config(**b, **ROTARY),
    "qwen2_moe": lambda b: T.Qwen2MoeConfig(**b, **ROTARY, num_experts=2, num_experts_per_tok=1),
    "qwen3": lambda b: T.Qwen3Config(**b, **ROTARY, head_dim=8),
    "smollm3": lambda b: T.SmolLM3Config(**b, **ROTARY),
    "stablelm": lambda b: T.StableLmConfig(**b, **ROTARY),
    "starcoder2": lambda b: T.Starcoder2Config(**b, **ROTARY),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_every_family_reads_one_prompt_in_rl_sft_sample_and_chat(family):
    template = list(TOKENIZERS)[list(CONFIGS).index(family) % len(TOKENIZERS)]
    tokenizer = TOKENIZERS[template]
    model = tiny(CONFIGS[family](shape_for(tokenizer)))
    asked = templates_own(tokenizer, QUESTION)
    plain = tokenizer(TEXT)["input_ids"]

    (chat_row, text_row), starts = lm_rows(
        [DEMO, {"prompt": TEXT, "completion": " the film"}], tokenizer
    )

    assert chat_row[: starts[0]] == asked
    assert asked_in_rl(model, tokenizer, QUESTION) == asked
    assert sampled_prompt(model, tokenizer, TEXT, chat=True) == asked
    assert chatted_prompt(model, tokenizer, QUESTION) == asked
    assert text_row[: starts[1]] == plain
    assert asked_in_rl(model, tokenizer, TEXT) == plain
    assert sampled_prompt(model, tokenizer, TEXT, chat=False) == plain
