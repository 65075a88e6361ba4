"""Stop strings: the oracle is the text from its beginning on, decoded anew after each token; and
transformers' own criterion. Several processes: the oracle is one process."""

import warnings

import pytest
import torch
import transformers
import two_processes
from small_trainer import PROMPTS as SMALL_PROMPTS
from small_trainer import trainer as small_trainer
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from instruct_goose.config import RLHFConfig
from instruct_goose.core.processes import in_processes, is_main_process, rank
from instruct_goose.models import decoding as decode
from instruct_goose.models.sampling import sample
from instruct_goose.models.tokens import bpe_tokenizer, pad
from instruct_goose.rollouts.evaluation import generate
from instruct_goose.rollouts.rollout import PromptBatch, Rollout, Tokens
from instruct_goose.rollouts.sampler import (
    PolicySampler,
    RatioOutliers,
    StopStrings,
    check_ratio,
    data_parallel,
)
from instruct_goose.training.callbacks import Callback
from instruct_goose.training.metrics import rollout_metrics
from instruct_goose.training.trainer import RLHFTrainer

TOKENIZER = bpe_tokenizer(
    ["the END. " * 9, "spENDs " * 9, "weEN on. " * 9, "end of it. "],
    300,
    lowercase=False,
    model_max_length=80,
    add_bos=False,
)
BASE = dict(
    vocab_size=len(TOKENIZER),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=80,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE),
    "llama": lambda: transformers.LlamaConfig(**BASE, intermediate_size=24),
}
PROMPTS = ["we", "in a b", "the", "x y z x y z x", "ha"]
LETTERS = [i for i in range(len(TOKENIZER)) if set(TOKENIZER.decode([i])) & set("ENDs. t")]


def tiny(name="llama", seed=0):
    "It likes the letters that the stops are made of."
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25)
    head = torch.nn.Linear(16, len(TOKENIZER))
    torch.nn.init.normal_(head.weight, std=0.35)
    with torch.no_grad():
        head.bias[:] = torch.tensor([2.5 * (i in LETTERS) for i in range(len(TOKENIZER))])
    model.lm_head = head
    return model


def rows():
    return [TOKENIZER(text)["input_ids"] for text in PROMPTS]


def dice(seed):
    return torch.Generator().manual_seed(seed)


def first(tokens, texts):
    "How many tokens there are up to the stop; None: it does not come."
    for n in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:n])
        if any(stop in text for stop in texts):
            return n
    return None


@pytest.mark.parametrize(
    "name,side,own,texts",
    [
        ("llama", "left", True, ("END",)),
        ("gpt2", "right", True, ("EN", " s")),
        ("llama", "right", False, ("s.", "t")),
        ("gpt2", "left", False, ("END", "t")),
    ],
)
def test_a_padded_batch_ends_where_the_text_of_each_row_does(name, side, own, texts, monkeypatch):
    if not own:
        monkeypatch.setattr(decode, "has_own_steps", lambda _: False)
    model = tiny(name)
    stops = StopStrings(texts, TOKENIZER)
    ids, mask = pad(rows() * 2, 9, side=side)
    limit = 30

    def write(stops=None):
        return sample(
            model, ids, mask, limit, 2, 0, generator=dice(4), with_logprobs=True, stops=stops
        )

    whole, written, logprobs = write()
    cut, stopped, cut_logprobs = write(stops.watch([[] for _ in ids]))

    ended = stops.ended(Rollout(ids, mask, cut, stopped), [2])
    kinds = set()
    for i in range(len(ids)):
        tokens = whole[i][written[i]].tolist()
        stop = first(tokens, texts)
        n = stop or len(tokens)
        assert cut[i][stopped[i]].tolist() == tokens[:n]
        assert stopped[i, :n].all() and not cut[i, n:].any()
        torch.testing.assert_close(cut_logprobs[i, :n], logprobs[i, :n], rtol=1e-4, atol=1e-5)
        assert ended[i] == (tokens[n - 1] == 2 or stop is not None)
        kinds.add((n < len(tokens), n == limit))
    assert (True, False) in kinds  # some stop early, before the limit
    assert cut.shape[1] <= whole.shape[1]


@pytest.mark.parametrize("texts", [("END",), ("EN", ". "), ("s",), ("the e", "Ds")])
def test_transformers_own_criterion_says_the_same_of_every_beginning(texts):
    theirs = StopStringCriteria(TOKENIZER, list(texts))
    ours = StopStrings(texts, TOKENIZER)
    generator = dice(1)
    vocabulary = torch.tensor([i for text in texts for i in TOKENIZER(text)["input_ids"]] + LETTERS)
    found = 0
    for _ in range(25):
        row = vocabulary[torch.randint(len(vocabulary), (12,), generator=generator)]
        for n in range(1, 13):
            is_stop = bool(theirs(row[None, :n], None))
            assert ours.found(row[:n].tolist()) == is_stop
            if is_stop:
                found += 1
                break
    assert found > 3


def trainer(trainer_class=RLHFTrainer, **changes):
    settings = dict(
        batch_size=10, group_size=2, max_new_tokens=12, device="cpu", stop_strings=("s", ".")
    )
    config = RLHFConfig.preset("rloo", **settings | changes)
    return trainer_class(tiny(), config=config, tokenizer=TOKENIZER)


class RecordsEnds(RLHFTrainer):
    "Remembers which responses of each minibatch ended."

    def loss(self, new, batch):
        self.ends = [*getattr(self, "ends", []), batch.ended]
        return super().loss(new, batch)


def test_in_the_trainer_a_stop_is_an_end():
    t = trainer(RecordsEnds, missing_eos_penalty=5.0, mask_truncated=True)
    r = t.rollout(PROMPTS)
    ended = []
    for ids, mask in zip(r.response_ids, r.mask, strict=True):
        text = TOKENIZER.decode(ids[mask])
        ended.append("s" in text or "." in text or int(ids[mask][-1]) == 2)
    assert r.ended.tolist() == ended and {True, False} == set(ended)

    r = t.score(r, lambda completions: [1.0] * len(completions))
    assert r.scores.tolist() == [1.0 if end else -4.0 for end in ended]

    experience = t.advantages(r)
    metrics = rollout_metrics(experience, t.config, t.eos_ids)
    assert metrics["finished"] == pytest.approx(sum(ended) / 10)
    t.optimize(experience)  # the others get no gradient
    assert all(batch.all() for batch in t.ends)
    assert sum(len(batch) for batch in t.ends) == sum(ended) * t.config.epochs

    assert t.evaluate(PROMPTS, lambda texts: [0.0] * len(texts))["held_out_reward"] <= 0
    greedy = t.sampler(PromptBatch(*pad(rows(), 0, "left")), 1, t.config, None)
    assert greedy.ended is not None and greedy.sampled_logprobs is not None and len(greedy) == 5


def test_a_stop_works_without_an_end_token():
    t = trainer(mask_truncated=True)
    t.eos_ids.clear()
    assert t.step(PROMPTS, lambda texts: [float(len(x)) for x in texts])["finished"] > 0


def test_stop_strings_need_a_tokenizer_and_texts(unchecked):
    t = trainer()
    queries = PromptBatch(*pad(rows(), 0, "left"))
    with pytest.raises(ValueError, match="give the trainer a tokenizer"):
        PolicySampler(t.agent, Tokens(None, [], 0))(queries, 1, t.config, dice(0))
    with unchecked(), pytest.raises(TypeError, match="stop_strings is 'END': it must be a tuple"):
        RLHFConfig(stop_strings="END")
    for wrong in ((), ("a", "")):
        with pytest.raises(ValueError, match="texts that are not empty, or None"):
            RLHFConfig(stop_strings=wrong)


# ---------------------------------------------------------------- several processes


class OwnRandomNumbers:
    "Takes the generator as it is, so that its texts depend on the process that asks."

    updates = 0

    def updated(self, model):
        self.updates += 1

    def __call__(self, queries, n, config, generator):
        ids = queries.ids.repeat_interleave(n, 0)
        mask = queries.mask.repeat_interleave(n, 0)
        width = int(torch.randint(2, 6, (), generator=generator))
        response_ids = torch.randint(1, 9, (len(ids), width), generator=generator)
        return Rollout(ids, mask, response_ids, torch.ones_like(response_ids).bool())


class Recorded:
    "The same rollouts again."

    def __init__(self, rollouts):
        self.rollouts = iter(rollouts)

    def __call__(self, queries, n, config, generator):
        return next(self.rollouts)


class KeepRollouts(Callback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, trainer, r):
        self.rollouts.append(Rollout(r.query_ids, r.query_mask, r.response_ids, r.mask))


def train_with(sampler):
    keep = KeepRollouts()
    t = two_processes.trainer_of("grpo", sampler=sampler, steps=3, **two_processes.GRPO)
    t.callbacks.append(keep)
    t.train(two_processes.PROMPTS, [two_processes.reward], progress=False)
    return two_processes.weights_of(t), keep.rollouts


def train_with_random_numbers_of_each_process():
    sampler = OwnRandomNumbers()
    weights, rollouts = train_with(sampler)
    return weights, rollouts, sampler.updates


def test_given_the_same_rollouts_several_processes_train_as_one():
    (one, rollouts, updates), (two, _, _) = in_processes(
        2, train_with_random_numbers_of_each_process, seconds=500
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert updates == 1 + 3  # before the first rollout, and after each iteration
    assert len({r.mask.shape[1] for r in rollouts}) > 1
    assert not torch.equal(rollouts[0].response_ids, rollouts[1].response_ids)
    alone, _ = train_with(Recorded(rollouts))
    assert two_processes.apart(alone, one) < 1e-9


def step_on_other_prompts():
    t = two_processes.trainer_of("grpo", **two_processes.GRPO)
    prompts = two_processes.PROMPTS
    message = "the prompts differ between process .* the trainer deals it out"
    with pytest.raises(ValueError, match=message):
        t.step(prompts[:3] if is_main_process() else prompts[1:4], two_processes.reward)
    return True


def test_processes_with_different_prompts_are_refused():
    assert in_processes(2, step_on_other_prompts) == [True, True]


def make_trainer_with_other_settings():
    with pytest.raises(ValueError, match="the settings differ"):
        two_processes.trainer_of("grpo", **two_processes.GRPO | dict(lr=1e-3 * (1 + rank())))
    return True


def test_processes_with_different_settings_are_refused():
    assert in_processes(2, make_trainer_with_other_settings) == [True, True]


def test_one_process_alone_samples_without_a_wrapper():
    sampler = OwnRandomNumbers()
    assert data_parallel(sampler, Tokens(TOKENIZER, [2], 0)) is sampler


class Reordered:
    "The policy's rows in another order, or without the last one, or twice."

    def __init__(self, agent, tokens, order):
        self.sampler = PolicySampler(agent, tokens)
        self.order = order

    def __call__(self, queries, n, config, generator):
        return self.sampler(queries, n, config, generator)[torch.tensor(self.order)]


@pytest.mark.parametrize(
    "order, says",
    [
        ([1, 0, *range(2, 8)], "row 0 of the sampler answers another prompt"),
        (list(range(7)), "returned 7 rows for 8 prompts"),
        ([*range(8), 7], "returned 9 rows for 8 prompts"),
    ],
)
def test_a_sampler_with_other_rows_is_refused(order, says):
    "The data's columns stand beside the rows by their order: each would get another's answer."
    t = small_trainer()
    t.use_sampler(lambda agent, tokens: Reordered(agent, tokens, order))
    with pytest.raises(ValueError, match=says):
        t.rollout(SMALL_PROMPTS)


def test_a_sampler_and_what_makes_one_are_not_taken_for_each_other():
    t = small_trainer()
    with pytest.raises(TypeError, match="lambda agent, tokens: sampler"):
        t.use_sampler(PolicySampler(t.agent, t.tokens))
    with pytest.raises(TypeError, match="trainer.use_sampler"):
        RLHFTrainer(
            t.agent.model, None, t.config, tokenizer=t.tokenizer, sampler=lambda agent, tokens: None
        )


class Counting(Reordered):
    "Remembers how often it was asked."

    asked = 0

    def __call__(self, queries, n, config, generator):
        self.asked += 1
        return self.sampler(queries, n, config, generator)

    def state_dict(self):
        return {"asked": self.asked}

    def check_state_dict(self, state):
        assert state.keys() == {"asked"}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_a_sampler_that_remembers_something_is_saved_with_the_trainer():
    made = []
    for _ in range(2):
        t = small_trainer()
        t.use_sampler(lambda agent, tokens: Counting(agent, tokens, []))
        made.append(t)
    made[0].rollout(SMALL_PROMPTS)
    made[1].load_state_dict(made[0].state_dict())
    assert made[1].sampler.asked == 1


def metaspace():
    "As SentencePiece: ▁ stands for a blank, and the decoder leaves out the first one."
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "▁the", "▁END", "▁", "END", ".", "▁film", "s"]
    pieces = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    pieces.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", eos_token="<eos>")


def llama_spaces():
    "As Llama 2's: ▁ is replaced, bytes fall back, and one leading blank is stripped."
    made = metaspace()
    made.backend_tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return made


def word_piece():
    "As BERT's: a word stands behind a blank, a piece with ## goes on."
    words = ["[PAD]", "[UNK]", "[SEP]", "the", "END", "##s", ".", "film"]
    pieces = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]")


def byte_level():
    return bpe_tokenizer(["the END. " * 9, " END"], 300, lowercase=False, add_bos=False)


@pytest.mark.parametrize(
    "make, the, end",
    [
        (metaspace, ["▁the"], ["▁END"]),
        (metaspace, ["▁the"], ["▁", "END"]),
        (llama_spaces, ["▁the"], ["▁END"]),
        (word_piece, ["the"], ["END"]),
        (byte_level, ["the"], ["ĠEND"]),
    ],
    ids=["metaspace", "metaspace in two", "llama", "wordpiece", "bytes"],
)
def test_a_stop_with_a_leading_blank_is_found_with_every_decoder(make, the, end):
    tokenizer = make()
    the, end = (tokenizer.convert_tokens_to_ids(tokens) for tokens in (the, end))
    stops = StopStrings([" END"], tokenizer)
    assert tokenizer.decode([*the, *end]) == "the END"
    assert stops.found(end, before=the)  # the response begins with it
    assert stops.found([*the, *end]) and stops.found([*the * 20, *end], before=the)
    assert not stops.found(the * 3, before=end)  # it stands in the prompt
    watch = stops.watch([[], []], [the, the])
    assert watch(torch.tensor([0, 1]), torch.tensor([end[0], the[0]])).tolist() == [
        len(end) == 1,
        False,
    ]
    query, response = pad([the, the], 0), pad([end, [the[0]] * len(end)], 0)
    assert stops.ended(Rollout(*query, *response), []).tolist() == [True, False]


def test_a_stop_without_a_blank_is_not_found_across_the_prompt():
    tokenizer = byte_level()
    one, two = (tokenizer(text)["input_ids"] for text in ("th", "e END"))
    assert not StopStrings(["the"], tokenizer).found(two, before=one)


def test_a_character_that_is_divided_between_prompt_and_response_is_no_error():
    tokenizer = byte_level()
    ids = tokenizer("é END", add_special_tokens=False)["input_ids"]
    assert StopStrings([" END"], tokenizer).found(ids[1:], before=ids[:1])


class Forgets(transformers.LlamaForCausalLM):
    "With a cache its logits are others than without: what it writes is not what it would read."

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
            output.logits = 0.5 * output.logits
        return output


def forgetful():
    torch.manual_seed(0)
    model = Forgets(CONFIGS["llama"]()).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.35)
    return model


@pytest.mark.parametrize("greedy", [False, True])
def test_a_model_whose_sampler_and_forward_disagree_is_not_evaluated(greedy):
    settings = RLHFConfig(batch_size=4, max_new_tokens=8, device="cpu", eval_every=1)
    t = RLHFTrainer(forgetful(), config=settings, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="sampler and the training forward disagree"):
        t.evaluate(PROMPTS, lambda texts: [0.0] * len(texts), greedy=greedy)
    with pytest.raises(ValueError, match="forward of Forgets disagree"):
        generate(forgetful(), TOKENIZER, PROMPTS, 8, greedy=greedy)
    generate(tiny(), TOKENIZER, PROMPTS, 8, greedy=greedy)


def ratios(off, n=200, deviation=0.6):
    "Log-probabilities of n tokens, of which some are off by a ratio of 1 + deviation."
    old = torch.full((1, n), -1.0)
    new = old.clone()
    new[0, :off] += torch.tensor(1 + deviation).log()
    return new, old, torch.ones(1, n, dtype=torch.bool)


@pytest.mark.parametrize(
    "eps, temperature, few, many",
    [(1.2e-7, 1.0, 2, 3), (0.0078, 1.0, 60, 70), (0.0078, 0.5, 120, 140)],
    ids=["float32", "bfloat16", "cold"],
)
def test_a_few_tokens_are_a_warning_and_more_are_an_error_that_names_the_cure(
    eps, temperature, few, many
):
    "A ratio of 1.6 is .47 nats: .15 of them on average are 64 of 200 tokens."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_ratio(eps, *ratios(0), "here")
    with pytest.warns(RatioOutliers, match="importance_cap=2"):
        largest = check_ratio(eps, *ratios(few), "here", temperature)
    assert largest.item() == pytest.approx(0.6, rel=1e-4)
    with pytest.raises(ValueError, match="(?s)here: at token 0 of response 0.*set importance_cap"):
        check_ratio(eps, *ratios(many), "here", temperature)
    new, old, mask = ratios(0)
    new[0, 7] = torch.nan
    with pytest.raises(ValueError, match="here"):
        check_ratio(eps, new, old, mask, "here")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_sound_model_is_refused_for_its_rounding(name, dtype, temperature):
    autocast = "bfloat16" if dtype == "autocast" else None
    settings = RLHFConfig.preset(
        "grpo",
        batch_size=16,
        group_size=4,
        max_new_tokens=16,
        device="cpu",
        temperature=temperature,
        autocast=autocast,
    )
    model = tiny(name).to(torch.float32 if autocast else dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = RLHFTrainer(model, config=settings, tokenizer=TOKENIZER)
        t.annotate(t.rollout(PROMPTS[:4]))
        with pytest.raises(ValueError, match="disagree"):
            wrong = t.rollout(PROMPTS[:4])
            for p in model.parameters():  # another model by now
                p.data = p.data.flip(0)
            t.annotate(wrong)
