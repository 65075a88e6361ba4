"""Response log-probabilities, entropies and states against one unpadded row at a time, for every padding and family."""

import pytest
import torch
import transformers
from deep import first
from row_alone import (
    BASE,
    EOS,
    LAYOUTS,
    PLAIN,
    RESPONSES,
    V,
    batch,
    gradients,
    near,
    oracle,
    tiny,
)
from torch.utils._python_dispatch import TorchDispatchMode

from instruct_goose.models.agent import Agent
from instruct_goose.models.families import context_length, hidden_size, plain_head
from instruct_goose.models.response import response_hidden, response_logits, response_logprobs
from instruct_goose.models.tokens import pad

# --- the same numbers for every padding, every architecture ---


@pytest.mark.parametrize("qside, rside, pad_id", LAYOUTS)
def test_every_layout_is_the_row_alone(any_model, qside, rside, pad_id):
    name, model = any_model
    model.train()  # dropout is in the config; it must not matter
    args = batch(qside, rside, pad_id)
    logprobs, entropies = response_logprobs(model, *args, temperature=0.7, with_entropy=True)
    hidden = response_hidden(model, *args)
    logits = response_logits(model, *args, temperature=0.7)
    for i, (lp, s, h, z) in enumerate(oracle(model, 0.7)):
        m = args[3][i]
        near(logprobs[i][m], lp)
        near(entropies[i][m], s)
        near(hidden[i][m], h)
        near(logits[i][m], z / 0.7)
    for out in (logprobs, entropies, hidden, logits):
        assert (out[~args[3]] == 0).all()
    assert (plain_head(model) is not None) == (name in PLAIN)


@pytest.mark.parametrize("qside, rside, pad_id", first(3, LAYOUTS))
def test_every_layout_has_the_gradient_of_the_row_alone(any_model, qside, rside, pad_id):
    name, model = any_model
    model.train()
    weights = torch.randn(
        3, 5, dtype=torch.float64
    )  # a loss in which no token can stand in for another
    args = batch(qside, rside, pad_id)
    logprobs, entropies = response_logprobs(model, *args, temperature=0.7, with_entropy=True)
    of_token = [weights[i, : len(r)] for i, r in enumerate(RESPONSES)]
    put = torch.zeros(3, 5, dtype=torch.float64).masked_scatter(args[3], torch.cat(of_token))
    ours = gradients(model, (put * (logprobs + 0.3 * entropies)).sum())
    theirs = gradients(
        model,
        sum(
            (w * (lp + 0.3 * s)).sum()
            for w, (lp, s, _, _) in zip(of_token, oracle(model, 0.7), strict=True)
        ),
    )
    assert max(g.abs().max() for g in theirs.values()) > 0.1
    # these two compute a part in float32, whatever the model is in, so that a batch and a row differ by float32's rounding
    for n in theirs:
        near(ours[n], theirs[n], atol=1e-6 if name.startswith(("gemma2", "cohere")) else 1e-9)


@pytest.mark.parametrize("poison", first(2, [V, -100, EOS, V - 1, -1, 10**12]))
@pytest.mark.parametrize("value_model", [None, "copy"])
def test_poisoned_padding_changes_nothing(family, poison, value_model):
    agent = Agent(family, value_model)
    torch.nn.init.normal_(agent.value_head.weight)
    q, qm, r, rm = batch()

    def look(q, r):
        e = agent.evaluate(q, qm, r, rm)
        return e, gradients(agent, (e.logprobs + e.values + e.entropy).sum())

    (clean, g0), (poisoned, g1) = (
        look(q, r),
        look(q.masked_fill(~qm, poison), r.masked_fill(~rm, poison)),
    )
    for a, b in zip(clean, poisoned, strict=True):
        near(a, b, atol=1e-12)
    for n in g0:
        near(g0[n], g1[n], atol=1e-12)
    texts, mask = torch.cat([q, r], -1), torch.cat([qm, rm], -1)
    agent.eval()  # forward keeps the mode it is in
    for a, b in zip(agent(texts, mask), agent(texts.masked_fill(~mask, poison), mask), strict=True):
        near(a, b, atol=1e-12)


# --- modes, precision, memory ---


class Largest(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max(
            [
                self.size,
                *(
                    t.numel()
                    for t in (out if isinstance(out, tuple | list) else (out,))
                    if torch.is_tensor(t)
                ),
            ]
        )
        return out


def test_the_table_of_logits_is_never_made():
    vocab, B, T = 4000, 40, 60
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **BASE | dict(vocab_size=vocab, hidden_size=8, max_position_embeddings=64)
        )
    )
    q = torch.ones(B, 1).long()
    r = torch.randint(vocab, (B, T))
    rm = torch.ones(B, T).bool()
    with Largest() as seen:
        response_logprobs(model, q, q, r, rm, with_entropy=True)[0].sum().backward()
    assert seen.size <= 2**24 / 4 < B * T * vocab / 2  # 16 MiB
    with Largest() as seen:
        response_logits(model, q, q, r, rm)  # the instrument sees it when it is there
    assert seen.size >= B * T * vocab


# --- what the head is ---


def test_a_new_head_is_asked_again():
    model = tiny("llama")
    assert plain_head(model) is model.lm_head

    class Adapted(torch.nn.Linear):  # as adapters do it: a linear layer with something added
        def forward(self, x):
            return super().forward(x) + 1.5 * x.sum(-1, keepdim=True) * torch.arange(V)

    adapted = Adapted(16, V, bias=False).double()
    model.lm_head = adapted
    assert plain_head(model) is None
    logprobs = response_logprobs(model, *batch())
    (_, _, _, rm) = batch()
    for i, (lp, *_) in enumerate(oracle(model)):
        near(logprobs[i][rm[i]], lp)
    model.lm_head = torch.nn.Linear(16, V).double()
    assert plain_head(model) is model.lm_head
    model.lm_head.register_forward_hook(lambda _, args, out: out * 2)  # as steering does it
    assert plain_head(model) is None
    logprobs = response_logprobs(model, *batch())
    for i, (lp, *_) in enumerate(oracle(model)):
        near(logprobs[i][rm[i]], lp)


# --- refusals ---


def refused(model, says, **changes):
    args = (
        dict(
            zip(("query_ids", "query_mask", "response_ids", "response_mask"), batch(), strict=True)
        )
        | changes
    )
    agent = Agent(model)
    for call in (
        response_hidden,
        response_logits,
        response_logprobs,
        lambda _, **args: agent.evaluate(**args),
        lambda _, **args: agent.values(**args),
    ):
        with pytest.raises(ValueError, match=says):
            call(model, **args)


def test_what_cannot_be_evaluated(unchecked):
    model = tiny("llama")
    q, qm, r, rm = batch()
    with unchecked():
        refused(
            model,
            r"no response token in row \[1\]",
            response_mask=rm & torch.tensor([[True], [False], [True]]),
        )
        refused(
            model,
            r"no query token in row \[0, 2\].*bos",
            query_mask=qm & torch.tensor([[False], [True], [False]]),
        )
        refused(
            model, r"response_ids \(3, 5\) and response_mask \(3, 4\)", response_mask=rm[:, :-1]
        )
        refused(model, "2 queries and 3 responses", query_ids=q[:2], query_mask=qm[:2])
        refused(
            model,
            "from 0 to 13, the model.s vocabulary from 0 to 12",
            query_ids=q.masked_fill(q == 7, V),
        )
        refused(model, "-5", response_ids=r.masked_fill(r == 11, -5))
        refused(model, "query_mask holds", query_mask=q)
        for m in (model, tiny("gemma2: capped logits")):
            with pytest.raises(ValueError, match="temperature"):
                response_logprobs(m, q, qm, r, rm, temperature=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_context_is_counted_in_tokens(name):
    model = tiny(name)
    assert context_length(model) == 14 and hidden_size(model) == 16
    rows = [([1, 4], [5] * 3), ([1] * 6, [7] * 8)]  # 14 tokens fit, whatever the padding
    args = *pad([q for q, _ in rows], 0, "right"), *pad([r for _, r in rows], 0, "left")
    wide = (
        torch.cat([torch.zeros(2, 9).long(), args[0]], -1),
        torch.cat([torch.zeros(2, 9).bool(), args[1]], -1),
        *args[2:],
    )
    for a in (args, wide):
        for i, (lp, *_) in enumerate(oracle(model, rows=rows)):
            near(response_logprobs(model, *a)[i][a[3][i]], lp)
    long = *pad([[1], [1] * 7], 0), *pad([[5], [7] * 8], 0)
    with pytest.raises(
        ValueError, match="row 1 has 7 query and 8 response tokens, the model's context is 14"
    ):
        response_logprobs(model, *long)
