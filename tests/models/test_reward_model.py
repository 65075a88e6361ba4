"""Oracles: hand numbers, double loops, finite differences, and one unpadded row at a time through transformers' own classifier."""

import copy
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers
from mixtures import mixture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from instruct_goose.models.families import trunk
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.rendering import Renderer
from instruct_goose.models.reward_model import (
    Classifier,
    CutTexts,
    PairwiseLoss,
    RewardModel,
    all_pairs_loss,
    check_spread,
    check_tokenizer,
    find_label,
    label_logits,
    last_token_logits,
    log_odds,
    longest_text,
    pairwise_loss,
    prompt_texts,
    rendered_answers,
    rendered_chats,
    template_rows,
    tokenizer_fingerprint,
)
from instruct_goose.models.tokens import PairDataset, bpe_tokenizer, pad, word_tokenizer
from instruct_goose.rollouts.rewards import score_texts

transformers.utils.logging.set_verbosity_error()
WORDS = "good bad film plot is the a so".split()
DISTINCT = word_tokenizer(WORDS, model_max_length=14)  # pad, bos and eos of their own
SHARED = word_tokenizer(
    WORDS, model_max_length=14, pad="<eos>", bos="<eos>", eos="<eos>"
)  # pad == bos == eos, as for GPT-2
BASE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=14)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
CONFIGS = {
    "gpt2": lambda **k: transformers.GPT2Config(
        **BASE, resid_pdrop=0.4, embd_pdrop=0.4, attn_pdrop=0.4, **k
    ),
    "llama": lambda **k: transformers.LlamaConfig(**ROTARY, attention_dropout=0.4, **k),
    "qwen2": lambda **k: transformers.Qwen2Config(**ROTARY, attention_dropout=0.4, **k),
    "opt": lambda **k: transformers.OPTConfig(
        **BASE, ffn_dim=24, word_embed_proj_dim=8, dropout=0.4, **k
    ),
    "bloom": lambda **k: transformers.BloomConfig(
        hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.4, **k
    ),
}


def make(name="gpt2", tokenizer=SHARED, dtype=torch.float32):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(
        CONFIGS[name](
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        dtype=dtype,
    )
    reward_model = RewardModel.from_causal_lm(lm, tokenizer)
    torch.nn.init.normal_(reward_model.model.score.weight)
    return reward_model


def rows(tokenizer, lengths=(5, 2, 7), end=True):
    draw = torch.Generator().manual_seed(1)
    words = tokenizer.convert_tokens_to_ids(WORDS)
    return [
        [words[i] for i in torch.randint(len(WORDS), (n,), generator=draw)]
        + [tokenizer.eos_token_id] * end
        for n in lengths
    ]


def alone(reward_model, row):
    "Transformers' own classifier on one unpadded row, its search for the pad id switched off."
    model = copy.deepcopy(reward_model.model).eval()
    model.config.pad_token_id = None
    return model(torch.tensor([row])).logits[0, 0].item()


@pytest.mark.parametrize("tokenizer", [SHARED, DISTINCT], ids=["pad is eos", "pad of its own"])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_text_one_score(name, tokenizer):
    reward_model = make(name, tokenizer).eval()
    texts = rows(tokenizer)
    want = torch.tensor([alone(reward_model, row) for row in texts])
    assert want.std() > 3e-3  # the head tells them apart
    for side in ("left", "right"):
        ids, mask = pad(texts, tokenizer.pad_token_id, side)
        wider_ids, wider = (
            torch.nn.functional.pad(x, (2, 3)) for x in (ids, mask)
        )  # padding on both sides
        for i, m in (
            (ids, mask),
            (ids, mask.long()),
            (ids.masked_fill(~mask, 10**7), mask),
            (ids.masked_fill(~mask, -1), mask),
            (wider_ids, wider),
        ):
            torch.testing.assert_close(reward_model(i, m).detach(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_score_texts_in_order_whatever_the_batch(name):
    reward_model = make(name, DISTINCT)
    texts = ["good film", "", "the plot is so so so bad", "bad", "a film"]
    want = [alone(reward_model, DISTINCT(t)["input_ids"]) for t in texts]
    reward_model.train()
    for size in (1, 2, 256):
        assert reward_model.score(texts, batch_size=size) == pytest.approx(want, abs=2e-5)
    assert reward_model.training and reward_model.score([]) == []
    assert all(type(x) is float for x in reward_model.score(texts))


def test_a_family_without_a_classifier_is_refused_in_a_sentence():
    with pytest.raises(
        ValueError, match="none for OlmoeForCausalLM: make it of a model of another"
    ):
        RewardModel.from_causal_lm(mixture("olmoe"), SHARED)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_causal_lm(name):
    lm = AutoModelForCausalLM.from_config(CONFIGS[name](vocab_size=len(SHARED)))
    before = copy.deepcopy(lm.state_dict())
    state = torch.get_rng_state()
    reward_model = RewardModel.from_causal_lm(lm, SHARED)
    assert torch.equal(state, torch.get_rng_state()) and reward_model(
        *pad(rows(SHARED), 0)
    ).tolist() == [0, 0, 0]
    for p in reward_model.parameters():
        p.data += 1
    assert all(
        torch.equal(before[k], v) for k, v in lm.state_dict().items()
    )  # the language model stays as it was
    assert getattr(lm.config, "reward_mean", None) is None


@pytest.mark.parametrize(
    "name, tokenizer", [(name, DISTINCT if name == "qwen2" else SHARED) for name in CONFIGS]
)
def test_save_and_load(name, tokenizer, tmp_path):
    reward_model = make(name, tokenizer).eval()
    texts = ["good film", "bad", "the plot is bad"]
    mean, std = reward_model.normalise(texts)
    reward_model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin")) and (tmp_path / "model.safetensors").exists()
    own = tokenizer if name == "qwen2" else None  # its own class would split otherwise
    for loaded in (RewardModel.from_pretrained(tmp_path, own), RewardModel(tmp_path, tokenizer)):
        ours = reward_model.model.state_dict()
        theirs = loaded.model.state_dict()
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[k], theirs[k]) for k in ours
        )  # weights: to the bit
        assert loaded.score(texts) == pytest.approx(reward_model.score(texts), abs=1e-5)
        assert loaded.tokenizer("good film")["input_ids"] == tokenizer("good film")["input_ids"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for row in rows(tokenizer) + rows(tokenizer, end=False):
        assert (plain(torch.tensor([row])).logits.item() - mean) / std == pytest.approx(
            reward_model(torch.tensor([row])).item(), abs=1e-4
        )


def test_tokenizer_mismatch(tmp_path):
    reward_model = make()
    reward_model.save_pretrained(tmp_path)
    fewer = word_tokenizer(WORDS[:-1], model_max_length=14, pad="<eos>", bos="<eos>", eos="<eos>")
    other = word_tokenizer(WORDS[::-1], model_max_length=14, pad="<eos>", bos="<eos>", eos="<eos>")
    with pytest.raises(ValueError, match=tokenizer_fingerprint(fewer)):
        RewardModel.from_pretrained(tmp_path, fewer)
    with pytest.raises(
        ValueError, match=f"{tokenizer_fingerprint(SHARED)}.*{tokenizer_fingerprint(other)}"
    ):
        RewardModel.from_pretrained(tmp_path, other)
    (tmp_path / "tokenizer.json").write_text(
        (lambda s: s.replace('"good"', '"great"'))((tmp_path / "tokenizer.json").read_text())
    )
    with pytest.raises(ValueError, match="other ids"):
        RewardModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("rows, n", [(128, 125), (128, 124), (130, 128), (1000, 10)])
def test_rows_of_an_embedding_without_a_token_are_for_the_hardware(rows, n):
    tokenizer = word_tokenizer([f"w{i}" for i in range(n - 4)], 14)
    model = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**BASE, vocab_size=rows, num_labels=1)
    )
    check_tokenizer(model, tokenizer)


@pytest.mark.parametrize(
    "scores, dtype, wide",
    [
        ([1.0, 1.0 + 15 * 2**-23], torch.float32, False),
        ([1.0, 1.0 + 17 * 2**-23], torch.float32, True),
        ([1.0, 1.0 + 17 * 2**-23], torch.bfloat16, False),
        ([math.nan, 1.0], torch.float32, False),
        ([1e200, -1e200], torch.float32, False),  # their deviation is beyond float64
    ],
)
def test_a_spread_of_eight_roundings_is_no_scale(scores, dtype, wide):
    "Two scores gap·ε apart have the standard deviation gap·ε/2; ε is 2⁻²³, and 2⁻⁷ of a model in bfloat16."
    with nullcontext() if wide else pytest.raises(ValueError, match="train the reward model first"):
        check_spread(torch.tensor(scores).double(), dtype)


# --- ready-made classifiers ---

JUDGED = "the a film plot is good bad very".split()
SENTENCE = word_tokenizer(JUDGED, 12, pad="<end>", bos="<end>", eos="<end>")
ENDED = word_tokenizer(
    JUDGED, 12, pad="<end>", bos="<end>", eos="<end>", add_eos=True
)  # texts end in what is padding
TEXTS = ["the film", "a very very bad plot", "film", "the plot is good", "bad bad", "a film"]


def classifier(kind, labels):
    torch.manual_seed(3)
    config = {
        "bert": transformers.BertConfig,
        "llama": transformers.LlamaConfig,
        "gpt2": transformers.GPT2Config,
    }[kind]
    made = AutoModelForSequenceClassification.from_config(
        config(
            vocab_size=len(SENTENCE),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=12,
            num_labels=labels,
        )
    )
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.train()  # dropout is on until it is asked


def slow(judge, tokenizer, label):
    judge.eval()
    scores = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            head = getattr(judge, "score", None)
            z = (
                judge(input_ids=ids).logits[0]
                if head is None
                else head(judge.base_model(input_ids=ids)[0])[0, -1]
            )
        p = z.double().softmax(-1)
        scores.append(z[0].item() if len(z) == 1 else (p[label] / (1 - p[label])).log().item())
    judge.train()
    return scores


@pytest.mark.parametrize("tokenizer", [SENTENCE, ENDED], ids=["open", "ended"])
@pytest.mark.parametrize(
    "kind, labels, label",
    [("bert", 1, None), ("bert", 3, "LABEL_2"), ("gpt2", 1, None), ("gpt2", 2, 0), ("llama", 3, 1)],
)
def test_each_text_as_if_alone(kind, labels, label, tokenizer):
    judge = classifier(kind, labels)
    where = {None: 0, "LABEL_2": 2}.get(label, label)
    for batch_size in (1, 64):
        assert Classifier(judge, tokenizer, label, batch_size=batch_size).score(
            TEXTS
        ) == pytest.approx(slow(judge, tokenizer, where), abs=1e-4)
    assert judge.training and all(p.grad is None for p in judge.parameters())


def test_a_pipeline_of_one_label_is_a_reward():
    judge = classifier("bert", 1)
    pipe = transformers.pipeline("text-classification", model=judge, tokenizer=SENTENCE)
    assert score_texts(pipe, TEXTS).scores.tolist() == pytest.approx(
        slow(judge, SENTENCE, 0), abs=1e-4
    )


@pytest.mark.parametrize(
    "call, error, says",
    [
        (
            lambda: score_texts(classifier("bert", 1), TEXTS),
            TypeError,
            r"reads token ids: pass Classifier\(model, tokenizer",
        ),
        (
            lambda: Classifier(classifier("bert", 1).bert, SENTENCE),
            TypeError,
            "BertModel is no sequence classifier",
        ),
        (
            lambda: Classifier(classifier("bert", 2), SENTENCE),
            ValueError,
            "label is None.*'LABEL_0', 'LABEL_1'",
        ),
        (
            lambda: Classifier(classifier("bert", 2), SENTENCE, "GOOD"),
            ValueError,
            "label is 'GOOD'.*'LABEL_0', 'LABEL_1'",
        ),
    ],
)
def test_what_is_no_judge(call, error, says, unchecked):
    with unchecked(), pytest.raises(error, match=says):
        call()


def framed(side="right", model_max_length=10**30):
    "It writes [CLS] in front and [SEP] behind, as BERT's does; it knows no limit of its own."
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    made = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        truncation_side=side,
        model_max_length=model_max_length,
    )


READERS = {
    "bert": (transformers.BertConfig, {}, 12),
    "roberta": (transformers.RobertaConfig, {"pad_token_id": 0}, 11),  # positions begin at 1
    "xlm-roberta": (transformers.XLMRobertaConfig, {"pad_token_id": 1}, 10),
    "distilbert": (transformers.DistilBertConfig, {"dim": 16, "n_heads": 2, "n_layers": 1}, 12),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", READERS)
def test_a_classifier_cuts_texts_by_its_own_length_and_says_so_once(name, side):
    config, own, limit = READERS[name]
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(
        config(
            **{"vocab_size": 12, "max_position_embeddings": 12, "num_labels": 1} | size | own,
        )
    ).eval()
    tokenizer = framed(side)
    words = ["film is good", " ".join(WORDS * 3), " ".join(WORDS[::-1] * 2)]
    scorer = Classifier(judge, tokenizer)
    with pytest.warns(CutTexts, match=f"2 of 3 texts are longer than the {limit} tokens"):
        scores = scorer.score(words)
    expected = []
    for text in words:
        inner = tokenizer(text, add_special_tokens=False)["input_ids"]
        kept = inner[: limit - 2] if side == "right" else inner[2 - limit :]
        ids = torch.tensor([[1, *kept, 2]])
        with torch.no_grad():
            expected.append(judge(input_ids=ids).logits.item())
    assert scores == pytest.approx(expected, abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scorer.score(words) == scores


def test_a_tokenizer_that_allows_less_is_obeyed():
    judge = classifier("bert", 1)
    with pytest.warns(CutTexts, match="longer than the 6 tokens"):
        Classifier(judge, framed(model_max_length=6)).score([" ".join(WORDS)])


def test_in_rl_it_reads_the_ids_that_it_was_trained_on():
    _, tokenizer = tiny_smollm("the film was good bad".split())
    question = [{"role": "user", "content": "the film"}]
    renderer = Renderer(tokenizer)
    row = renderer.row(question, "was good")
    text = renderer.row("the film", " was bad")
    reward_model = make("llama", tokenizer).eval()
    trained = PairDataset(
        [
            {"prompt": question, "chosen": "was good", "rejected": "was bad"},
            {"prompt": "the film", "chosen": " was bad", "rejected": " was good"},
        ],
        tokenizer,
    )

    asked = reward_model.score(
        ["the film was good", "the film was bad"],
        prompts=[question, "the film"],
        completions=["was good", "was bad"],
        prompt_ids=[row.prompt_ids, text.prompt_ids],
        completion_ids=[row.answer_ids + row.end_ids, text.answer_ids + text.end_ids],
        tokenizer=copy.deepcopy(tokenizer),
    )

    want = [alone(reward_model, trained[i]["chosen"]) for i in (0, 1)]
    assert asked == pytest.approx(want, abs=2e-5)
    other = reward_model.score(
        ["user the film assistant was good", "the film was bad"],
        prompts=[question, "the film"],
        completions=["was good", "was bad"],
        prompt_ids=[[1], [1]],
        completion_ids=[[1], [1]],
        tokenizer=DISTINCT,
    )
    assert other == pytest.approx(want, abs=2e-5)


def test_rows_of_ids_are_scored_as_their_texts():
    reward_model = make("llama", DISTINCT).eval()
    texts = ["good film", "the plot is bad"]
    ids = DISTINCT(texts)["input_ids"]
    assert reward_model.score(ids) == reward_model.score(texts)
    assert make("llama", DISTINCT).normalise(ids) == make("llama", DISTINCT).normalise(texts)


# --- conversations, where only the marks of the chat template say who speaks


CHATS = [[{"role": "user", "content": "good"}], [{"role": "user", "content": "bad"}]]
WEATHER = {"name": "weather"}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t['name'] + ' ' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def chat_judge(kind):
    "A judge whose score depends on every token, with a chat template that takes tools."
    _, tokenizer = tiny_smollm(["good", "bad", "film", "weather"])
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.model_max_length = 14
    torch.manual_seed(3)
    config = transformers.GPT2Config(**BASE, vocab_size=len(tokenizer), num_labels=1)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    judge = (
        RewardModel(model, tokenizer) if kind == "reward model" else Classifier(model, tokenizer)
    )
    return judge, model, tokenizer


def expected_scores(model, tokenizer, tools):
    "Scores of what the template writes of each conversation, one row at a time."
    scores = []
    for chat, answer, own in zip(CHATS, ("film", "bad"), tools, strict=True):
        whole = [*chat, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(whole, tools=own, return_dict=True)["input_ids"]
        scores.append(last_token_logits(model, torch.tensor([ids])).item())
    return scores


@pytest.mark.parametrize("kind", ["reward model", "classifier"])
@pytest.mark.parametrize("tools", [None, [[WEATHER], [{"name": "film"}, WEATHER]]])
@torch.no_grad()
def test_a_judge_reads_conversations_through_its_own_template_with_the_datas_columns(kind, tools):
    judge, model, tokenizer = chat_judge(kind)
    columns = {} if tools is None else {"tools": tools}
    texts = ["user good assistant film", "user bad assistant bad"]  # decoded: no marks
    scores = judge.score(texts, prompts=CHATS, completions=["film", "bad"], **columns)
    expected = expected_scores(model, tokenizer, tools or [None, None])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert scores != pytest.approx(judge.score(texts), abs=1e-3)


@torch.no_grad()
def test_a_policy_with_another_chat_template_is_read_through_the_reward_models_own():
    judge, model, tokenizer = chat_judge("reward model")
    policy = copy.deepcopy(tokenizer)
    policy.chat_template = TOOL_TEMPLATE.replace("<|im_start|>' + m", "' + m")
    scores = judge.score(
        ["good film", "bad bad"],
        prompts=CHATS,
        completions=["film", "bad"],
        prompt_ids=[[3, 4], [3, 5]],
        completion_ids=[[6], [5]],
        tokenizer=policy,
    )
    assert scores == pytest.approx(expected_scores(model, tokenizer, [None, None]), abs=1e-5)


def plain_judge():
    "A reward model whose score depends on every token, of bytes in pairs."
    tokenizer = bpe_tokenizer(["the film was good. "] * 9, 300, lowercase=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|ask|>"]})
    torch.manual_seed(3)
    config = transformers.GPT2Config(**BASE, vocab_size=len(tokenizer), num_labels=1)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    return RewardModel(model, tokenizer), tokenizer


@pytest.mark.parametrize(
    "prompt, answer", [("<|ask|>the fi", "lm."), ("the  film", " was"), ("the fil", "m was")]
)
@torch.no_grad()
def test_a_plain_prompt_of_a_policy_with_another_tokenizer_is_read_as_in_training(prompt, answer):
    """A special token in the prompt, blanks that the policy's decoding leaves out, and a token of
    the reward model that lies across the border."""
    judge, tokenizer = plain_judge()
    words = word_tokenizer(["<|ask|>", "the", "fi", "fil", "film", "was", "m"])
    words.add_special_tokens({"additional_special_tokens": ["<|ask|>"]})
    prompt_ids = words(prompt)["input_ids"]
    decoded = words.decode(prompt_ids, skip_special_tokens=True)
    pair = PairDataset([{"prompt": prompt, "chosen": answer, "rejected": " x"}], tokenizer)
    want = alone(judge, pair[0]["chosen"])

    [asked] = judge.score(
        [decoded + answer],
        prompts=[prompt],
        completions=[answer.strip()],
        prompt_ids=[prompt_ids],
        completion_ids=[[1]],
        tokenizer=words,
    )

    assert asked == pytest.approx(want, abs=1e-5)
    [trial] = judge.score([prompt + answer], prompts=[prompt], completions=[answer])
    assert trial == pytest.approx(want, abs=1e-5)
    assert judge.score(["the"], prompts=["a"], completions=["b"]) == judge.score(["the"])


@torch.no_grad()
def test_a_template_of_a_classifier_may_give_ids():
    _, model, tokenizer = chat_judge("classifier")
    judge = Classifier(model, tokenizer, template=lambda prompt, completion: [3, 4, 5])
    [score] = judge.score(["good"], prompts=["good"], completions=["bad"])
    assert score == pytest.approx(
        last_token_logits(model, torch.tensor([[3, 4, 5]])).item(), abs=1e-5
    )


# --- losses


@pytest.mark.parametrize(
    "margin, leads",
    [
        (None, [1.5, 0.0, -4.0]),
        (0.5, [1.0, -0.5, -4.5]),
        (torch.tensor([0.5, -1.0, 0.0]), [1.0, 1.0, -4.0]),
    ],
)
def test_a_pair_costs_the_logarithm_of_its_probability(margin, leads):
    chosen, rejected = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.5, 0.0, 3.0])
    expected = [math.log(1 + math.exp(-lead)) for lead in leads]
    loss = pairwise_loss(chosen.bfloat16(), rejected.bfloat16(), margin)
    assert loss.dtype == torch.float32 and loss.tolist() == pytest.approx(expected, rel=1e-6)
    mean = PairwiseLoss()(chosen, rejected, margin)
    assert mean.item() == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_a_loss_of_no_pairs_or_of_other_shapes_is_refused(unchecked):
    with unchecked(), pytest.raises(ValueError, match="no pairs"):
        PairwiseLoss()(torch.ones(0), torch.ones(0))
    with unchecked(), pytest.raises(ValueError):
        pairwise_loss(torch.ones(2), torch.ones(3))
    with unchecked(), pytest.raises(ValueError):
        pairwise_loss(torch.ones(2), torch.ones(2), torch.ones(3))
    with unchecked(), pytest.raises(ValueError, match="shape"):
        all_pairs_loss(torch.ones(2), torch.tensor([1, 2, 3]))
    for ratings in ([3, 3], []):
        with pytest.raises(ValueError, match="without two different"):
            all_pairs_loss(torch.ones(len(ratings)), torch.tensor(ratings))


def test_all_pairs_of_different_ratings_count_alike():
    scores, ratings = [0.5, -1.0, 2.0, 0.0, 1.0], [3, 1, 2, 3, 1]
    losses = []
    for r, y in zip(scores, ratings, strict=True):
        for other_r, other_y in zip(scores, ratings, strict=True):
            if y > other_y:
                losses.append(math.log(1 + math.exp(other_r - r)))
    found = all_pairs_loss(torch.tensor(scores).bfloat16(), torch.tensor(ratings))
    assert found.dtype == torch.float32 and len(losses) == 8
    assert found.item() == pytest.approx(sum(losses) / 8, rel=1e-6)


# --- what a classifier says


def test_the_log_odds_of_a_label_against_all_others():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    for label in range(3):
        p = logits.double().softmax(-1)[:, label]
        torch.testing.assert_close(log_odds(logits, label).double(), (p / (1 - p)).log())
    assert log_odds(logits[:, :1].bfloat16(), 0).tolist() == [1.0, 0.0]
    assert log_odds(logits.bfloat16(), 0).dtype == torch.float32


@pytest.mark.parametrize(
    "names, label, index",
    [
        ({0: "GOOD"}, None, 0),
        ({0: "BAD", 1: "GOOD"}, "GOOD", 1),
        ({0: "BAD", 1: "GOOD"}, 0, 0),
        ({"0": "BAD", "1": "GOOD"}, 1, 1),
        ({}, None, 0),
        ({0: "BAD", 1: "GOOD"}, None, None),
        ({0: "BAD", 1: "GOOD"}, 2, None),
        ({0: "GOOD", 1: "GOOD"}, "GOOD", None),
    ],
)
def test_a_label_is_found_by_its_name_or_its_index(names, label, index):
    judge = classifier("bert", max(len(names), 1))
    vars(judge.config)["id2label"] = names
    if index is None:
        with pytest.raises(ValueError, match=f"label is {label!r}: pass one of the classifier's"):
            find_label(judge, label)
    else:
        assert find_label(judge, label) == index


@torch.no_grad()
def test_all_labels_are_read_at_the_last_token():
    judge = classifier("llama", 3).eval()
    ids, mask = torch.tensor([[5, 4, 6], [0, 7, 5]]), torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    found = label_logits(judge, ids, mask)
    for row, text in zip(found, ([5, 4], [7, 5]), strict=True):
        alone = judge.score(judge.model(torch.tensor([text])).last_hidden_state)[0, -1]
        torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)
    one = classifier("llama", 1).eval()
    whole = last_token_logits(one, ids)  # without a mask nothing is padding
    assert whole.equal(last_token_logits(one, ids, torch.ones_like(ids)))
    with pytest.raises(ValueError, match="attention_mask holds"):
        last_token_logits(one, ids, ids)


# --- a reward model and its tokenizer


def test_a_fingerprint_is_that_of_the_vocabulary_and_of_how_texts_are_cut():
    own = tokenizer_fingerprint(DISTINCT)
    size, _, digest = own.partition("-")
    assert size == str(len(DISTINCT)) and len(digest) == 16
    assert tokenizer_fingerprint(copy.deepcopy(DISTINCT)) == own
    others = [
        word_tokenizer(WORDS[::-1], model_max_length=14),
        word_tokenizer(WORDS, model_max_length=14, add_eos=True),
        word_tokenizer([*WORDS, "more"], model_max_length=14),
    ]
    assert len({own, *map(tokenizer_fingerprint, others)}) == 4


def small_classifier(tokenizer, **options):
    config = transformers.GPT2Config(**BASE, vocab_size=len(tokenizer), **options)
    return transformers.GPT2ForSequenceClassification(config)


@pytest.mark.parametrize("tokenizer, pad_id", [(SHARED, None), (DISTINCT, 0)])
def test_transformers_looks_for_padding_only_where_it_has_a_token_of_its_own(tokenizer, pad_id):
    judge = RewardModel(small_classifier(tokenizer, num_labels=1), tokenizer)
    config = judge.model.config
    assert config.pad_token_id == pad_id
    assert (config.reward_mean, config.reward_std) == (0.0, 1.0)
    assert config.reward_tokenizer == tokenizer_fingerprint(tokenizer)


def test_a_pad_token_that_the_model_cannot_read_is_not_looked_for():
    tokenizer = word_tokenizer(WORDS, model_max_length=14)
    model = small_classifier(tokenizer, num_labels=1)
    tokenizer.add_special_tokens({"pad_token": "<far>"})
    with pytest.warns(UserWarning, match="'<far>'"):
        judge = RewardModel(model, tokenizer)
    assert judge.model.config.pad_token_id is None


def test_a_judge_with_other_outputs_than_one_is_refused():
    for model in (small_classifier(SHARED, num_labels=2), classifier("bert", 1)):
        with pytest.raises(TypeError, match="has no head `score` with one output"):
            RewardModel(model, SHARED)
    bare = word_tokenizer(WORDS)
    bare.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        RewardModel(small_classifier(SHARED, num_labels=1), bare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_reward_model_begins_with_the_language_models_states_and_scores_of_zero(dtype):
    lm = AutoModelForCausalLM.from_config(CONFIGS["llama"](vocab_size=len(SHARED)), dtype=dtype)
    lm.config.dtype = torch.float16  # in which it was stored
    judge = RewardModel.from_causal_lm(lm, SHARED)
    assert {p.dtype for p in judge.parameters()} == {dtype} and not judge.model.training
    assert judge.model.config.dtype == torch.float16
    for name, p in trunk(lm).state_dict().items():
        assert p.equal(trunk(judge.model).state_dict()[name])
    assert not judge.model.score.weight.any()
    assert judge.model.config.num_labels == 1 and lm.config.num_labels != 1


def test_normalised_scores_have_mean_zero_and_deviation_one():
    "A text that stands there twice counts twice; to normalise again changes nothing."
    judge = make("llama", DISTINCT)
    texts = ["good film", "bad", "the plot is bad", "bad"]
    raw = torch.tensor(judge.score(texts), dtype=torch.float64)
    mean, std = judge.normalise(texts)
    assert mean == pytest.approx(raw.mean().item(), abs=1e-6)
    assert std == pytest.approx(((raw - raw.mean()) ** 2).mean().sqrt().item(), rel=1e-5)
    expected = ((raw - mean) / std).tolist()
    assert judge.score(texts) == pytest.approx(expected, abs=1e-5)
    assert judge.normalise(texts) == pytest.approx((mean, std), abs=1e-5)
    with pytest.raises(ValueError, match="train the reward model first"):
        judge.normalise(["bad", "bad"])
    with pytest.raises(ValueError, match="these 0 texts"):
        judge.normalise([])


@pytest.mark.parametrize("context, own, limit", [(14, 20, 14), (14, 9, 9), (None, 20, 20)])
def test_a_text_is_as_long_as_positions_and_tokenizer_allow(context, own, limit):
    tokenizer = word_tokenizer(WORDS, model_max_length=own)
    name = "bloom" if context is None else "llama"  # BLOOM's positions have no end
    assert longest_text(make(name, tokenizer).model, tokenizer) == limit


def test_texts_that_are_empty_too_long_or_unreadable_are_named():
    judge = make("llama", DISTINCT)
    judge.score(["good " * 13])
    with pytest.raises(ValueError, match="text 1 has 15 tokens, the limit is 14"):
        judge.score(["good", "good " * 14])
    with pytest.raises(ValueError, match="text 1 is empty"):
        judge.score([[4], []])
    with pytest.raises(ValueError, match="text 1: the token .* is beyond"):
        judge.score([[4], [len(DISTINCT)]])
    with pytest.raises(TypeError, match="texts is one string"):
        judge.score("good film")


# --- rows of prompts and answers


def test_columns_of_the_data_become_arguments_of_each_row():
    tools = [[WEATHER], None]
    kwargs = [{"mood": 1}, {"tools": []}]
    assert template_rows(2, tools, None, kwargs) == [
        {"tools": [WEATHER], "mood": 1},
        {"tools": []},
    ]
    assert template_rows(2, None, [[WEATHER], []], None) == [{"documents": [WEATHER]}, {}]
    assert template_rows(2, None, None, None) == [{}, {}]


def test_prompts_are_decoded_without_their_special_tokens():
    prompts = ["good film", CHATS[0]]
    ids = [DISTINCT("good film")["input_ids"], DISTINCT("bad")["input_ids"]]
    assert prompt_texts(prompts, ids, DISTINCT) == ["good film", "bad"]
    assert prompt_texts(prompts, None, DISTINCT) == ["good film", ""]
    assert prompt_texts(prompts, ids, None) == ["good film", ""]


@pytest.mark.parametrize(
    "row, prompt, head, expected",
    [
        ("the film good", "the film", "", "the film good"),
        ("film good", "the film", "film", "the film good"),  # decoding left a word out
        ("film good", "the film", "other", None),
        ("the film good", CHATS[0], "the film", None),
        ([4, 5], "the film", "", None),
    ],
)
def test_an_answer_stands_behind_the_prompt_as_the_data_has_it(row, prompt, head, expected):
    [found] = rendered_answers(DISTINCT, [row], [prompt], [head])
    assert found == (row if expected is None else DISTINCT(expected)["input_ids"])


def test_rows_keep_their_places_where_some_are_conversations():
    _, _, tokenizer = chat_judge("classifier")
    prompts, answers = [CHATS[0], "good", CHATS[1]], ["film", " bad", "bad"]
    columns = [{"tools": [WEATHER]}, {}, {}]
    found = rendered_chats(tokenizer, ["x", "good bad", "y"], prompts, answers, columns)
    assert found[1] == "good bad"
    for i in (0, 2):
        whole = [*prompts[i], {"role": "assistant", "content": answers[i]}]
        written = tokenizer.apply_chat_template(whole, **columns[i], return_dict=True)
        assert found[i] == written["input_ids"]
    assert rendered_chats(tokenizer, ["x"], ["good"], ["bad"], [{}]) == ["x"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_ids_are_cut_where_the_tokenizer_cuts(side):
    judge = Classifier(classifier("bert", 1), framed(side))
    row = [1, *[4] * 5, *[5] * 5, 2, 6]
    with pytest.warns(CutTexts, match="1 of 2 texts .* text 1 with 13: each is cut"):
        found = judge.rows(["film", row])
    cut = row[:12] if side == "right" else row[1:]
    assert found == [framed()("film")["input_ids"], cut]


def test_a_text_of_just_the_length_that_is_read_is_not_cut(recwarn):
    judge = Classifier(classifier("bert", 1), framed())
    assert judge.rows([" ".join(["film"] * 10), [4] * 12]) == [[1, *[6] * 10, 2], [4] * 12]
    assert not recwarn


@torch.no_grad()
def test_texts_are_read_as_they_are_where_prompts_or_completions_are_missing():
    judge, model, tokenizer = chat_judge("reward model")
    texts = ["good film", "bad bad"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    expected = [last_token_logits(model, torch.tensor([row])).item() for row in ids]
    for given in ({}, {"prompts": CHATS}, {"completions": ["film", "bad"]}):
        assert judge.score(texts, **given) == pytest.approx(expected, abs=1e-5)


def test_a_template_of_a_classifier_needs_prompts_and_completions():
    judge = Classifier(classifier("bert", 1), SENTENCE, template="{} {}".format)
    [score] = judge.score(["x"], prompts=["the film"], completions=["is good"])
    plain = Classifier(classifier("bert", 1), SENTENCE)
    assert score == pytest.approx(plain.score(["the film is good"])[0], abs=1e-6)
    for given in ({"prompts": ["x"]}, {"completions": ["x"]}, {}):
        with pytest.raises(ValueError, match="a template needs prompts and completions"):
            judge.score(["x"], **given)
