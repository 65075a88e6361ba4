"""The oracle is one unpadded row at a time through the model's own forward, in eval mode."""
import copy
import gc
import itertools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from instruct_goose.models.agent import Agent, create_reference_model
from instruct_goose.models.families import context_length, evaluating, hidden_size, plain_head, trunk
from instruct_goose.models.response import forward_hidden, response_hidden, response_logits, response_logprobs
from instruct_goose.models.tokens import pad

transformers.utils.logging.set_verbosity_error()
V, EOS = 13, 2
BASE = dict(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=14,
            pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
ROTARY = BASE | dict(intermediate_size=24, num_key_value_heads=1)
# the three families named in the design, with dropout, then heads and positions of other kinds
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**BASE, resid_pdrop=.4, embd_pdrop=.4, attn_pdrop=.4),
    "llama": lambda: transformers.LlamaConfig(**ROTARY, attention_dropout=.4),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY, attention_dropout=.4),
    "qwen3": lambda: transformers.Qwen3Config(**ROTARY, head_dim=8, attention_dropout=.4),
    "phi: a head with bias": lambda: transformers.PhiConfig(**ROTARY, resid_pdrop=.4),
    "bloom: no position ids": lambda: transformers.BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=.4),
    "opt: a narrow head": lambda: transformers.OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, max_position_embeddings=14, word_embed_proj_dim=8),
    "bert: a head that transforms": lambda: transformers.BertConfig(**BASE, intermediate_size=24, is_decoder=True),
    "gemma2: capped logits": lambda: transformers.Gemma2Config(**ROTARY, head_dim=8, final_logit_softcapping=2., attention_dropout=.4),
    "cohere: scaled logits": lambda: transformers.CohereConfig(**ROTARY, logit_scale=.3),
    "granite: divided logits": lambda: transformers.GraniteConfig(**ROTARY, logits_scaling=3.),
}
PLAIN = {name for name in CONFIGS if name.split(":")[0] not in ("bert", "gemma2", "cohere", "granite")}
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3"]
LAYOUTS = list(itertools.product(("left", "right"), ("left", "right"), (EOS, 0)))

# rows of 5, 6 and 7 tokens; queries and responses hold the end token, which is also the padding in half of the tests
QUERIES = [[1, 5, 7], [1], [1, 4, 2, 6, 8]]
RESPONSES = [[8, 2], [2, 11, 3, 12, 2], [7, 4]]


def tiny(name, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for p in model.parameters(): torch.nn.init.normal_(p, std=.4)
    return model.to(dtype)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda n: n.split(":")[0])
def any_model(request): return request.param, tiny(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request): return tiny(request.param)


def batch(qside="left", rside="right", pad_id=EOS): return *pad(QUERIES, pad_id, qside), *pad(RESPONSES, pad_id, rside)


def oracle(model, temperature=1., rows=None):
    "logprobs, entropies, hidden states and logits of every row, unpadded."
    found = []
    with evaluating(model):
        for q, r in rows or zip(QUERIES, RESPONSES, strict=True):
            ids = torch.tensor([q + r])
            logits = model(input_ids=ids).logits[0, len(q) - 1:-1]
            dist = torch.distributions.Categorical(logits=logits / temperature)
            hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(q) - 1:-1]
            found.append((dist.log_prob(torch.tensor(r)), dist.entropy(), hidden, logits))
    return found


# A tensor read from a file lies elsewhere in memory, and a kernel may add its terms in another order. Two orders of a sum of n terms
# differ by at most 2·n·eps of the terms' size (Higham, eq. 3.3). Ten sums a layer, two layers, n = 24 at most; and each of the four
# matrices on a path, 16 wide with weights of sd .4, may lengthen an error by 2·.4·√16 = 3.2.
ROUNDING = 2 * 24 * 20 * 3.2**4 * torch.finfo(torch.float64).eps  # 2e-11


def same_bits(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    assert not [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]


def near(a, b, atol=1e-10): torch.testing.assert_close(a, b, atol=atol, rtol=0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


# --- the same numbers for every padding, every architecture ---

@pytest.mark.parametrize("qside, rside, pad_id", LAYOUTS)
def test_every_layout_is_the_row_alone(any_model, qside, rside, pad_id):
    name, model = any_model
    model.train()  # dropout is in the config; it must not matter
    args = batch(qside, rside, pad_id)
    logprobs, entropies = response_logprobs(model, *args, temperature=.7, with_entropy=True)
    hidden, logits = response_hidden(model, *args), response_logits(model, *args, temperature=.7)
    for i, (lp, s, h, z) in enumerate(oracle(model, .7)):
        m = args[3][i]
        near(logprobs[i][m], lp); near(entropies[i][m], s); near(hidden[i][m], h); near(logits[i][m], z / .7)
    for out in (logprobs, entropies, hidden, logits): assert (out[~args[3]] == 0).all()
    assert (plain_head(model) is not None) == (name in PLAIN)


@pytest.mark.parametrize("qside, rside, pad_id", LAYOUTS)
def test_every_layout_has_the_gradient_of_the_row_alone(any_model, qside, rside, pad_id):
    name, model = any_model
    model.train()
    weights = torch.randn(3, 5, dtype=torch.float64)  # a loss in which no token can stand in for another
    args = batch(qside, rside, pad_id)
    logprobs, entropies = response_logprobs(model, *args, temperature=.7, with_entropy=True)
    of_token = [weights[i, :len(r)] for i, r in enumerate(RESPONSES)]
    put = torch.zeros(3, 5, dtype=torch.float64).masked_scatter(args[3], torch.cat(of_token))
    ours = gradients(model, (put * (logprobs + .3 * entropies)).sum())
    theirs = gradients(model, sum((w * (lp + .3 * s)).sum() for w, (lp, s, _, _) in zip(of_token, oracle(model, .7), strict=True)))
    assert max(g.abs().max() for g in theirs.values()) > .1
    # these two compute a part in float32, whatever the model is in, so that a batch and a row differ by float32's rounding
    for n in theirs: near(ours[n], theirs[n], atol=1e-6 if name.startswith(("gemma2", "cohere")) else 1e-9)


def test_padding_between_the_tokens(family):
    torch.manual_seed(1)
    for _ in range(5):  # real tokens in random columns
        def scattered(rows, width):
            mask = torch.stack([(torch.randperm(width) < len(r)) for r in rows])
            return torch.zeros(len(rows), width).long().masked_scatter(mask, torch.tensor(sum(rows, []))), mask
        args = *scattered(QUERIES, 8), *scattered(RESPONSES, 9)
        logprobs = response_logprobs(family, *args)
        for i, (lp, *_) in enumerate(oracle(family)): near(logprobs[i][args[3][i]], lp)


@pytest.mark.parametrize("poison", [EOS, V - 1, V, -100, -1, 10**12])
@pytest.mark.parametrize("value_model", [None, "copy"])
def test_poisoned_padding_changes_nothing(family, poison, value_model):
    agent = Agent(family, value_model)
    torch.nn.init.normal_(agent.value_head.weight)
    q, qm, r, rm = batch()
    def look(q, r):
        e = agent.evaluate(q, qm, r, rm)
        return e, gradients(agent, (e.logprobs + e.values + e.entropy).sum())
    (clean, g0), (poisoned, g1) = look(q, r), look(q.masked_fill(~qm, poison), r.masked_fill(~rm, poison))
    for a, b in zip(clean, poisoned, strict=True): near(a, b, atol=1e-12)
    for n in g0: near(g0[n], g1[n], atol=1e-12)
    texts, mask = torch.cat([q, r], -1), torch.cat([qm, rm], -1)
    agent.eval()  # forward keeps the mode it is in
    for a, b in zip(agent(texts, mask), agent(texts.masked_fill(~mask, poison), mask), strict=True): near(a, b, atol=1e-12)


def test_masks_of_integers(family):
    q, qm, r, rm = batch()
    near(response_logprobs(family, q, qm.long(), r, rm.int()), response_logprobs(family, q, qm, r, rm), atol=0)


def test_rows_do_not_know_of_each_other(family):
    q, qm, r, rm = batch()
    whole = response_logprobs(family, q, qm, r, rm)
    near(torch.cat([response_logprobs(family, q[i:i + 1], qm[i:i + 1], r[i:i + 1], rm[i:i + 1]) for i in range(3)]), whole)


def test_against_the_scores_of_generate():
    model = tiny("gpt2").eval()  # transformers' own sampler, left padding and cache, as an outside witness
    model.generation_config.eos_token_id = None
    q, qm = pad(QUERIES, 0, "left")
    out = model.generate(input_ids=q, attention_mask=qm.long(), max_new_tokens=6, do_sample=False,
                         output_scores=True, return_dict_in_generate=True, pad_token_id=0)
    r = out.sequences[:, q.shape[1]:]
    theirs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    near(response_logprobs(model, q, qm, r, torch.ones_like(r)), theirs.double(), atol=1e-5)


def test_all_responses_together_have_probability_one(family):
    r = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    q, qm = (x.repeat(len(r), 1) for x in pad([[1, 5]], 0))
    total = response_logprobs(family, q, qm, r, torch.ones_like(r)).sum(-1).exp().sum()
    near(total, torch.ones_like(total))


# --- modes, precision, memory ---

def test_modes_are_given_back(family):
    family.train(); list(family.modules())[3].eval()
    before = [m.training for m in family.modules()]
    response_logprobs(family, *batch())
    assert [m.training for m in family.modules()] == before
    with pytest.raises(RuntimeError, match="x"), evaluating(family): raise RuntimeError("x")
    assert [m.training for m in family.modules()] == before


def test_twice_the_same_in_training_mode(family):
    agent = Agent(family.train(), "copy")
    a, b = agent.train().evaluate(*batch()), agent.evaluate(*batch())
    for x, y in zip(a, b, strict=True): near(x, y, atol=0)
    assert family.training


def test_no_gradient_where_none_is_wanted(any_model):
    _, model = any_model
    with torch.no_grad(): assert not response_logprobs(model, *batch()).requires_grad
    assert response_logprobs(model, *batch()).requires_grad
    frozen = create_reference_model(model)
    assert not response_logprobs(frozen, *batch()).requires_grad


@pytest.mark.parametrize("name", ["gpt2", "gemma2: capped logits"])
def test_half_precision_models_answer_in_float32(name):
    model = tiny(name, dtype=torch.float32)
    half = Agent(copy.deepcopy(model).bfloat16())
    found = half.evaluate(*batch())
    assert all(x.dtype == torch.float32 for x in found) and half.value_head.weight.dtype == torch.float32
    assert half.model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert half.bfloat16().evaluate(*batch()).values.dtype == torch.float32  # also when the head was cast along
    near(found.logprobs, response_logprobs(model, *batch()), atol=.5)
    logits = response_logits(half.model, *batch())  # rounding to bfloat16 comes before the softmax, none after
    dist = torch.distributions.Categorical(logits=logits.float())
    near(found.logprobs[batch()[3]], dist.log_prob(batch()[2])[batch()[3]], atol=.05)


class Largest(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(t): self.size = max(self.size, t.numel())
        return out


def test_the_table_of_logits_is_never_made():
    vocab, B, T = 4000, 40, 60
    config = transformers.GPT2Config(**BASE | dict(vocab_size=vocab, hidden_size=8, max_position_embeddings=64))
    model = transformers.GPT2LMHeadModel(config)
    q = torch.ones(B, 1).long(); r = torch.randint(vocab, (B, T)); rm = torch.ones(B, T).bool()
    with Largest() as seen: response_logprobs(model, q, q, r, rm, with_entropy=True)[0].sum().backward()
    assert seen.size <= 2**24 / 4 < B * T * vocab / 2  # 16 MiB
    with Largest() as seen: response_logits(model, q, q, r, rm)  # the instrument sees it when it is there
    assert seen.size >= B * T * vocab
    short = torch.arange(T) < 2  # padding does not go through the head, either
    with Largest() as seen: response_logprobs(model, q, q, r, short.expand(B, T))
    assert seen.size < B * T * vocab / 20


# --- what the head is ---

def test_the_probe_leaves_no_trace(any_model):
    _, model = any_model
    model.train()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    plain_head(copy.deepcopy(model))
    fresh = copy.deepcopy(model); plain_head(fresh)
    assert torch.equal(torch.get_rng_state(), before) and fresh.training
    assert not fresh.get_output_embeddings()._forward_hooks
    assert all(torch.equal(v, state[k]) for k, v in fresh.state_dict().items())


def test_a_new_head_is_asked_again():
    model = tiny("llama")
    assert plain_head(model) is model.lm_head

    class Adapted(torch.nn.Linear):  # as adapters do it: a linear layer with something added
        def forward(self, x): return super().forward(x) + 1.5 * x.sum(-1, keepdim=True) * torch.arange(V)
    adapted = Adapted(16, V, bias=False).double()
    model.lm_head = adapted
    assert plain_head(model) is None
    logprobs, (_, _, _, rm) = response_logprobs(model, *batch()), batch()
    for i, (lp, *_) in enumerate(oracle(model)): near(logprobs[i][rm[i]], lp)
    model.lm_head = torch.nn.Linear(16, V).double()
    assert plain_head(model) is model.lm_head
    logprobs = response_logprobs(model, *batch())
    for i, (lp, *_) in enumerate(oracle(model)): near(logprobs[i][rm[i]], lp)
    for hook in (lambda _, args, out: out * 2, None):  # as steering does it
        handle = model.lm_head.register_forward_hook(hook) if hook else model.lm_head.register_forward_pre_hook(lambda _, args: args[0] * 2)
        assert plain_head(model) is None
        logprobs = response_logprobs(model, *batch())
        for i, (lp, *_) in enumerate(oracle(model)): near(logprobs[i][rm[i]], lp)
        handle.remove()


def test_forgotten_models_are_forgotten():
    from instruct_goose.models.families import _SCALING
    gc.collect(); before = len(_SCALING)
    model = tiny("llama"); plain_head(model)
    assert len(_SCALING) == before + 1
    del model; gc.collect()
    assert len(_SCALING) == before


# --- the agent ---

@pytest.mark.parametrize("value_model", [None, "copy"])
def test_values_stand_before_each_token(any_model, value_model):
    _, model = any_model
    agent = Agent(model, value_model)
    assert (agent.evaluate(*batch()).values == 0).all()  # exactly, at the start
    torch.nn.init.normal_(agent.value_head.weight); torch.nn.init.normal_(agent.value_head.bias)
    w, b = agent.value_head.weight[0], agent.value_head.bias[0]
    for qside, rside, pad_id in LAYOUTS:
        args = batch(qside, rside, pad_id)
        found = agent.evaluate(*args, temperature=.7)
        for i, (lp, s, h, _) in enumerate(oracle(model, .7)):
            m = args[3][i]
            near(found.values[i][m], h @ w + b); near(found.logprobs[i][m], lp); near(found.entropy[i][m], s)
        assert (found.values[~args[3]] == 0).all()
        near(agent.values(*args), found.values)


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_is_the_row_alone(any_model, value_model, side):
    _, model = any_model
    agent = Agent(model, value_model).eval()
    torch.nn.init.normal_(agent.value_head.weight)
    if value_model:  # no longer the policy's numbers
        with torch.no_grad(): next(agent.value_model.parameters()).mul_(2)
    ids, mask = pad(QUERIES, 0, side)
    logits, values = agent(ids, mask.long())
    for i, row in enumerate(QUERIES):
        alone = torch.tensor([row])
        near(logits[i][mask[i]], model(input_ids=alone).logits[0])
        near(values[i][mask[i]], (agent.value_trunk(input_ids=alone).last_hidden_state @ agent.value_head.weight[0])[0])
        for a, b in zip(agent(alone), (logits, values), strict=True): near(a[0], b[i][mask[i]])
    assert (logits[~mask] == 0).all() and (values[~mask] == 0).all()


def test_forward_knows_training_mode():
    agent = Agent(tiny("gpt2")).train()
    ids = torch.tensor([[1, 4, 5, 6]])
    assert not torch.equal(agent(ids).logits, agent(ids).logits)
    assert torch.equal(agent.eval()(ids).logits, agent(ids).logits)


def test_who_learns_from_what(family):
    shared, separate = Agent(copy.deepcopy(family)), Agent(copy.deepcopy(family), "copy")
    for agent in (shared, separate):
        policy, value = ({id(p) for p in ps} for ps in (agent.policy_parameters(), agent.value_parameters()))
        assert not policy & value and policy | value == {id(p) for p in agent.parameters()}
    count = lambda ps: sum(p.numel() for p in ps)
    assert count(shared.value_parameters()) == 17
    assert count(separate.value_parameters()) == count(trunk(family).parameters()) + 17
    def reaches_policy(agent):
        agent.zero_grad(); agent.evaluate(*batch()).values.sum().backward()
        return any(p.grad is not None and p.grad.abs().max() > 0 for p in agent.policy_parameters())
    assert not reaches_policy(shared) and shared.value_head.weight.grad.abs().max() > 0  # the head starts at zero
    for agent in (shared, separate): torch.nn.init.ones_(agent.value_head.weight)
    assert reaches_policy(shared) and not reaches_policy(separate)


def test_a_value_model_of_ones_own(family, tmp_path):
    other = tiny("gpt2", seed=1)
    agent = Agent(family, other)
    assert agent.value_trunk is other.transformer
    torch.nn.init.ones_(agent.value_head.weight)
    args, found = batch(), agent.evaluate(*batch())
    for i, (own, others) in enumerate(zip(oracle(family), oracle(other), strict=True)):
        m = args[3][i]
        near(found.logprobs[i][m], own[0]); near(found.values[i][m], others[2].sum(-1))
    assert Agent(family, family).value_model is None and Agent(family, trunk(family)).value_model is None  # its own: shared
    other.save_pretrained(tmp_path / "other")
    near(Agent(family, tmp_path / "other").value_trunk.wte.weight, other.transformer.wte.weight, atol=0)
    for sizes in (dict(vocab_size=V + 1), dict(max_position_embeddings=9)):
        wrong = transformers.GPT2Model(transformers.GPT2Config(**BASE | sizes))
        with pytest.raises(ValueError, match=r"\(13, 14\) for the policy"): Agent(family, wrong)


def test_what_is_not_a_language_model(unchecked):
    with unchecked():
        for wrong in (torch.nn.Linear(2, 2), transformers.GPT2Model(transformers.GPT2Config(**BASE))):
            with pytest.raises(TypeError, match="no language-model head"): Agent(wrong)


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("name", [*FAMILIES, "gemma2: capped logits"])
def test_saved_and_loaded(name, value_model, tmp_path):
    agent = Agent(tiny(name), value_model).eval()
    torch.nn.init.normal_(agent.value_head.weight)
    if value_model: torch.nn.init.normal_(next(agent.value_model.parameters()))  # no longer equal to the policy's
    agent.save_pretrained(tmp_path / "new" / "agent")
    again = Agent.from_pretrained(tmp_path / "new" / "agent")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "agent")
    same_bits(again, agent)
    same_bits(plain, agent.model)
    for a, b in zip(agent.evaluate(*batch()), again.evaluate(*batch()), strict=True): near(a, b, atol=ROUNDING)
    near(plain(batch()[0]).logits, agent.model(batch()[0]).logits, atol=ROUNDING)
    files = {f.name for f in tmp_path.rglob("*") if f.is_file()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "head.safetensors"}
    beside = {f.name for f in (tmp_path / "new" / "agent").glob("*.safetensors")}
    assert beside == {"model.safetensors"}  # an engine takes each of them for the policy's
    assert {k for k, _ in again.named_parameters()} == {k for k, _ in agent.named_parameters()}
    assert Agent(str(tmp_path / "new" / "agent")).value_head.weight.abs().max() == 0


def test_an_older_value_model_is_not_picked_up(tmp_path):
    Agent(tiny("gpt2"), "copy").save_pretrained(tmp_path)
    Agent(tiny("gpt2", 1)).save_pretrained(tmp_path)
    assert Agent.from_pretrained(tmp_path).value_model is None


def test_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match="no values/head.safetensors"): Agent.from_pretrained(tmp_path / "nowhere")
    tiny("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Agent\\(directory\\)"): Agent.from_pretrained(tmp_path)


def test_precision_survives(tmp_path):
    Agent(tiny("llama", dtype=torch.bfloat16)).save_pretrained(tmp_path)
    again = Agent.from_pretrained(tmp_path)
    assert again.model.dtype == torch.bfloat16 and again.value_head.weight.dtype == torch.float32
    assert Agent.from_pretrained(tmp_path, dtype=torch.float32).model.dtype == torch.float32


# --- the reference ---

@pytest.mark.parametrize("wrap", [lambda m: m, Agent, lambda m: Agent(m, "copy")], ids=["model", "agent", "separate"])
def test_the_reference_stays(family, wrap):
    model = copy.deepcopy(family).train()
    agent = wrap(model)
    reference = create_reference_model(agent)
    assert type(reference) is type(model) and not reference.training and model.training and reference.dtype == torch.float64
    assert not any(p.requires_grad for p in reference.parameters()) and all(p.requires_grad for p in model.parameters())
    start = response_logprobs(reference, *batch())
    near(start, response_logprobs(model, *batch()), atol=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    response_logprobs(model, *batch()).sum().backward(); optimizer.step()
    near(response_logprobs(reference, *batch()), start, atol=0)
    assert (response_logprobs(model, *batch()) - start).abs().max() > .01


# --- refusals ---

def refused(model, says, error=ValueError, **changes):
    args = dict(zip(("query_ids", "query_mask", "response_ids", "response_mask"), batch(), strict=True)) | changes
    agent = Agent(model)
    for call in (response_hidden, response_logits, response_logprobs):
        with pytest.raises(error, match=says): call(model, **args)
    for call in (agent.evaluate, agent.values):
        with pytest.raises(error, match=says): call(**args)


def test_what_cannot_be_evaluated(unchecked):
    model = tiny("llama")
    q, qm, r, rm = batch()
    with unchecked():
        refused(model, r"no response token in row \[1\]", response_mask=rm & torch.tensor([[True], [False], [True]]))
        refused(model, r"no query token in row \[0, 2\].*bos", query_mask=qm & torch.tensor([[False], [True], [False]]))
        refused(model, "no response token in row", response_ids=r[:, :0], response_mask=rm[:, :0])
        refused(model, r"response_ids \(3, 5\) and response_mask \(3, 4\)", response_mask=rm[:, :-1])
        refused(model, r"query_ids \(3, 5\) and query_mask \(3, 4\)", query_mask=qm[:, 1:])
        refused(model, "2 queries and 3 responses", query_ids=q[:2], query_mask=qm[:2])
        refused(model, "no rows", query_ids=q[:0], query_mask=qm[:0])
        refused(model, "from 0 to 13, the model.s vocabulary from 0 to 12", query_ids=q.masked_fill(q == 7, V))
        refused(model, "-5", response_ids=r.masked_fill(r == 11, -5))
        refused(model, "query_mask holds", query_mask=q)
        refused(model, "response_mask is torch.float", TypeError, response_mask=rm.float())
        refused(model, "query_ids is torch.float", TypeError, query_ids=q.float())
        for temperature in (0, -1.):
            for call in (response_logits, response_logprobs, lambda m, *a, **k: Agent(m).evaluate(*a, **k)):
                for m in (model, tiny("gemma2: capped logits")):
                    with pytest.raises(ValueError, match="temperature"): call(m, q, qm, r, rm, temperature=temperature)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_context_is_counted_in_tokens(name):
    model = tiny(name)
    assert context_length(model) == 14 and hidden_size(model) == 16
    rows = [([1, 4], [5] * 3), ([1] * 6, [7] * 8)]  # 14 tokens fit, whatever the padding
    args = *pad([q for q, _ in rows], 0, "right"), *pad([r for _, r in rows], 0, "left")
    wide = (torch.cat([torch.zeros(2, 9).long(), args[0]], -1), torch.cat([torch.zeros(2, 9).bool(), args[1]], -1), *args[2:])
    for a in (args, wide):
        logprobs = response_logprobs(model, *a)
        for i, (lp, *_) in enumerate(oracle(model, rows=rows)): near(logprobs[i][a[3][i]], lp)
    long = *pad([[1], [1] * 7], 0), *pad([[5], [7] * 8], 0)
    with pytest.raises(ValueError, match="row 1 has 7 query and 8 response tokens, the model's context is 14"): response_logprobs(model, *long)


def test_positions_reach_the_model():
    model = tiny("gpt2").eval()  # forward_hidden on a left-padded batch: only right with positions
    ids, mask = pad(QUERIES, 0, "left")
    hidden = forward_hidden(trunk(model), ids, mask)
    for i, row in enumerate(QUERIES): near(hidden[i][mask[i]], trunk(model)(torch.tensor([row])).last_hidden_state[0])
    naive = trunk(model)(ids, attention_mask=mask.long()).last_hidden_state
    assert (naive[1, -1] - hidden[1, -1]).abs().max() > .1


@pytest.mark.parametrize("value_model", [None, "copy"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_recomputed_layers_give_the_same_gradient_in_either_mode(kind, value_model):
    "Dropout of .5 in the config, training mode outside: neither the forward nor the second one may see it."
    made = {"gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=17, n_positions=12, n_embd=8, n_layer=3, n_head=2, resid_pdrop=.5, attn_pdrop=.5, embd_pdrop=.5)),
            "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
                                                          attention_dropout=.5, max_position_embeddings=12))}[kind]
    grads, counts = [], []
    for again in (False, True):
        torch.manual_seed(0)
        agent = Agent(made().double(), value_model, gradient_checkpointing=again).train()
        torch.nn.init.normal_(agent.value_head.weight)
        blocks = [m for m in agent.modules() if type(m).__name__ in ("GPT2MLP", "LlamaMLP")]
        passes = []
        query, response = torch.tensor([[0, 3, 5], [2, 2, 9]]), torch.tensor([[7, 1, 4, 0], [3, 16, 0, 0]])
        qmask = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool(); rmask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
        with torch.no_grad(): agent.evaluate(query, qmask, response, rmask)  # at first sight it is asked whether it is causal
        for block in blocks: block.register_forward_pre_hook(lambda *_: passes.append(1))  # noqa: B023
        out = agent.evaluate(query, qmask, response, rmask)
        (out.logprobs.sum() + out.values.square().sum()).backward()
        assert all(m.training for m in agent.modules())
        grads.append([p.grad for p in agent.parameters()]); counts.append(len(passes) / len(blocks))
    assert counts == [1, 2]
    for a, b in zip(*grads, strict=True): torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    with torch.no_grad(): agent.evaluate(query, qmask, response, rmask)
    assert len(passes) == 3 * len(blocks)  # nothing is computed twice where no gradient is asked for


def test_a_model_without_checkpointing_is_refused():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=17, n_positions=12, n_embd=8, n_layer=1, n_head=2))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="no gradient checkpointing"): Agent(model, gradient_checkpointing=True)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_an_entropy_that_nobody_wants_is_not_computed(with_entropy):
    batch = (*pad([[1, 5, 7], [1]], 2, side="left"), *pad([[8, 2], [2, 11, 3]], 2))
    assert (Agent(tiny("gpt2")).evaluate(*batch, with_entropy=with_entropy).entropy is not None) == with_entropy
