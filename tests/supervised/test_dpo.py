"""DPO on a language model: the rows, their log-probabilities token by token, padding, and the
optimum of a world that can be counted.
"""

import math

import pytest
import small_models
import torch

from instruct_goose.models.agent import create_reference_model
from instruct_goose.models.loading import tiny_smollm
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.rollouts.prompts import encode_rows
from instruct_goose.rollouts.rollout import Tokens
from instruct_goose.runs.resume import CheckpointManager
from instruct_goose.supervised.dpo import (
    kto_loss,
    labelled_rows,
    pair_rows,
    row_logprobs,
    train_dpo,
    train_kto,
)

TOKENIZER = word_tokenizer("a b c d e".split())
THUMBS = [
    {"prompt": "a b", "completion": " c d", "label": True},
    {"prompt": "a b", "completion": " e", "label": False},
    {"completion": "b c d e", "label": True},
    {"prompt": "e", "completion": " d", "label": False},
]
PAIRS = [
    {"prompt": "a b", "chosen": " c d", "rejected": " e"},
    ("a", "b c d e"),
    {"chosen": "e d", "rejected": "d"},
]


def tiny(name="gpt2", seed=0):
    return small_models.tiny(name, seed).double()


def test_rows_divide_at_the_prompt():
    ids = TOKENIZER.convert_tokens_to_ids
    bos, eos = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    a, b, c, d, e = ids("a b c d e".split())
    assert pair_rows(PAIRS, TOKENIZER) == [
        (([bos, a, b], [c, d, eos]), ([bos, a, b], [e, eos])),
        (([bos], [a, eos]), ([bos], [b, c, d, e, eos])),
        (([bos], [e, d, eos]), ([bos], [d, eos])),
    ]


@pytest.mark.parametrize(
    "train, rows, columns",
    [
        (train_dpo, PAIRS, ["accuracy", "margin", "chosen_logprob", "rejected_logprob"]),
        (train_kto, THUMBS, ["kl", "accuracy", "margin"]),
    ],
)
def test_it_goes_on_from_where_it_was_killed_to_the_bit(tmp_path, train, rows, columns):
    """The same process and shapes. The log's own columns come back too; the batch is cut in the
    middle of a pass.
    """

    def sitting(out, kill=None):
        out.mkdir(exist_ok=True)
        model = tiny()
        keeper = CheckpointManager(out, {}, steps=6, every=1)
        keeper.resume()

        def killed(step, log):
            if step == kill:
                raise KeyboardInterrupt

        with keeper:
            history = train(
                model,
                TOKENIZER,
                rows,
                steps=6,
                lr=1e-2,
                ref_model=create_reference_model(tiny()),
                batch_size=3,
                progress=False,
                stage=keeper.stage("dpo"),
                callback=killed,
            )
        return history, [p.detach().clone() for p in model.parameters()]

    whole, weights = sitting(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        sitting(tmp_path / "cut", 2)
    again, resumed = sitting(tmp_path / "cut")
    assert (
        again == whole
        and len(whole) == 6
        and list(again[0]) == ["step", "loss", *columns, "lr", "grad_norm"]
    )
    assert all(p.equal(q) for p, q in zip(resumed, weights, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logprobs_against_one_row_at_a_time(name):
    "No padding and no masks in the oracle: each row alone, summed token by token."
    model = tiny(name)
    rows = [row for pair in pair_rows(PAIRS, TOKENIZER) for row in pair]
    expected = []
    with torch.no_grad():
        for given, response in rows:
            lp = model(torch.tensor([given + response])).logits[0].double().log_softmax(-1)
            expected.append(
                sum(lp[len(given) + t - 1, token].item() for t, token in enumerate(response))
            )
    for pad_id in (0, TOKENIZER.eos_token_id, 5):  # whatever fills the padding
        torch.testing.assert_close(
            row_logprobs(model, rows, pad_id).double(),
            torch.tensor(expected, dtype=torch.float64),
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize(
    "train, rows, options, says",
    [
        (train_dpo, [], {}, "no texts"),
        (train_dpo, [PAIRS[0], {"chosen": "a"}], {}, "pair 1 is"),
        (
            train_dpo,
            [PAIRS[0], {"chosen": "a", "rejected": "b", "margin": 2.0}],
            {},
            "pair 1 has a",
        ),
        (train_dpo, [("a " * 30, "b")], {}, "context of 12"),
        (train_dpo, PAIRS, {"beta": 0}, "beta is 0"),
        (train_kto, [{"completion": "a", "label": 1}], {}, "row 0"),
        (train_kto, THUMBS[:1], {}, "two kinds"),
        (train_kto, [*THUMBS, {"completion": "a " * 30, "label": True}], {}, "context of 12"),
        (train_kto, THUMBS, {"batch_size": 1}, "batch_size is 1"),
    ],
)
def test_refusals(train, rows, options, says):
    def go(ref, model=tiny()):
        return train(
            model, TOKENIZER, rows, steps=1, lr=1e-3, ref_model=ref, progress=False, **options
        )

    with pytest.raises(ValueError, match=says):
        go(create_reference_model(tiny()))
    model = tiny()
    with pytest.raises(ValueError, match="shares parameters"):
        go(model, model)


def test_margin_and_accuracy_of_dpo_by_hand():
    """m = log π/π_ref of the chosen − log π/π_ref of the rejected, by plain forwards; right where
    it is above 0.
    """
    pairs = [("a b", "c"), ("d", "e a b"), ("c c", "e b"), ("b", "a"), ("c e", "b a d")]
    model, ref = tiny(), tiny(seed=1)

    def logp(m, text):
        ids = TOKENIZER(text)["input_ids"] + [
            TOKENIZER.eos_token_id
        ]  # which begin with the token that begins every text
        table = m.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(table[i, a].item() for i, a in enumerate(ids[1:]))

    margins = [logp(model, c) - logp(ref, c) - logp(model, r) + logp(ref, r) for c, r in pairs]
    chosen, rejected = (sum(logp(model, pair[k]) for pair in pairs) / 5 for k in (0, 1))
    (log,) = train_dpo(
        model,
        TOKENIZER,
        pairs,
        steps=1,
        lr=1e-4,
        ref_model=ref,
        beta=0.5,
        batch_size=5,
        progress=False,
    )
    assert (log["chosen_logprob"], log["rejected_logprob"]) == (
        pytest.approx(chosen, abs=1e-6),
        pytest.approx(rejected, abs=1e-6),
    )
    assert log["margin"] == pytest.approx(sum(margins) / 5, abs=1e-6) and log[
        "accuracy"
    ] == pytest.approx(sum(m > 0 for m in margins) / 5)
    assert (
        log["loss"]
        == pytest.approx(sum(math.log1p(math.exp(-0.5 * m)) for m in margins) / 5, abs=1e-6)
        and 0 < log["accuracy"] < 1
    )


# --- KTO ---


def test_the_kto_loss_by_hand():
    """ℓ = .6, −.1, .3 of three good answers and −.4 of a bad one, z = .1, λ_U = 3: (.3775 + .5498
    + .4502 + 3·.3775)/4; and its slope at 0.
    """
    ell, good = (
        torch.tensor([0.6, -0.1, 0.3, -0.4], dtype=torch.float64),
        torch.tensor([True, True, True, False]),
    )
    found = kto_loss(ell, good, torch.tensor(0.1), 1.0, 1.0, 3.0)
    expected = [1 / (1 + math.exp(x)) for x in (0.5, -0.2, 0.2)] + [3 / (1 + math.exp(0.5))]
    assert found.tolist() == pytest.approx(expected) and found.mean().item() == pytest.approx(
        0.6275, abs=5e-5
    )
    start = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    kto_loss(start, good, torch.tensor(0.0), 0.1, 1.0, 3.0).sum().backward()
    assert start.grad.tolist() == pytest.approx([-0.025, -0.025, -0.025, 0.075])


def test_the_first_step_of_kto_against_plain_forwards_one_row_at_a_time():
    """The order of the batch is read off the batches themselves; z pairs each prompt with the
    answer of the row before.
    """
    from instruct_goose.supervised.fit import batches

    model = tiny()
    ref = tiny(seed=1)
    eos = TOKENIZER.eos_token_id
    bos = TOKENIZER.bos_token_id

    def ids(text):
        return TOKENIZER(text, add_special_tokens=False)["input_ids"]

    def ratio(q, y):
        given, response = [bos, *ids(q)], [*ids(y), eos]
        tables = [
            m.eval()(torch.tensor([given + response])).logits[0].log_softmax(-1)
            for m in (model, ref)
        ]
        ours, theirs = (
            sum(table[len(given) + t - 1, a].item() for t, a in enumerate(response))
            for table in tables
        )
        return ours - theirs

    rows = [THUMBS[i] for i in next(batches(range(4), 4, seed=5))]
    q, y, good = ([row.get(k, "") for row in rows] for k in ("prompt", "completion", "label"))
    z = max(0.0, sum(ratio(q[i], y[i - 1]) for i in range(4)) / 4)
    ahead = [(1 if up else -1) * (ratio(*x) - z) for *x, up in zip(q, y, good)]
    (log,) = train_kto(
        model,
        TOKENIZER,
        THUMBS,
        steps=1,
        lr=1e-4,
        ref_model=ref,
        beta=0.5,
        bad_weight=2.0,
        batch_size=4,
        seed=5,
        progress=False,
    )
    assert log["kl"] == pytest.approx(z, abs=1e-6) and log["margin"] == pytest.approx(
        sum(ahead) / 4, abs=1e-6
    )
    assert log["loss"] == pytest.approx(
        sum((1 if up else 2) / (1 + math.exp(0.5 * x)) for x, up in zip(ahead, good)) / 4, abs=1e-6
    )


def test_pairs_and_thumbs_of_messages_stand_behind_the_prompt_that_rl_gives():
    _, tokenizer = tiny_smollm("the film was good bad".split())
    question = [{"role": "user", "content": "the film"}]
    prompt = encode_rows([question], Tokens(tokenizer, [], 0))[0]
    good, bad = ([{"role": "assistant", "content": x}] for x in ("was good", "was bad"))
    forms = [
        {"prompt": question, "chosen": good, "rejected": bad},
        {"prompt": question, "chosen": "was good", "rejected": "was bad"},
        {"prompt": "the film", "chosen": good, "rejected": bad},
        {"chosen": question + good, "rejected": question + bad},
        (question + good, question + bad),
    ]

    rows = pair_rows(forms, tokenizer)
    thumbs, _ = labelled_rows(
        [
            {"prompt": question, "completion": good, "label": True},
            {"prompt": question, "completion": "was bad", "label": False},
        ],
        tokenizer,
    )

    assert all(row == rows[0] for row in rows)
    assert [given for given, _ in rows[0]] == [prompt, prompt]
    assert [answer[-1] for _, answer in rows[0]] == [tokenizer.eos_token_id] * 2
    assert thumbs == list(rows[0])


def test_a_pair_that_cannot_be_rendered_is_refused_by_its_number():
    _, tokenizer = tiny_smollm("the film was good bad".split())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'].split('|')[-1] }}{% endfor %}"
    question = [{"role": "user", "content": "the film"}]
    pair = {"prompt": question, "chosen": "was good", "rejected": "was bad"}
    unlike = {"prompt": [{"role": "user", "content": "the|film"}], "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match="pair 1, chosen: .*leaves out what turn 0"):
        pair_rows([pair, unlike], tokenizer)


def test_layers_that_transformers_was_asked_to_recompute_are_recomputed():
    passes = []
    model = tiny("llama")
    reference = create_reference_model(model)
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(
            lambda *_: passes.append(1) if torch.is_grad_enabled() else None
        )
    options = dict(steps=1, lr=1e-3, batch_size=2, ref_model=reference, progress=False)
    train_dpo(model, TOKENIZER, PAIRS[:2], **options)
    plain = len(passes)
    model.activation_checkpointing_enable()
    train_dpo(model, TOKENIZER, PAIRS[:2], **options)
    assert len(passes) - plain == 2 * plain == 2 * len(model.model.layers)
