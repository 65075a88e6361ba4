"""The models, prompts and reward of every comparison: the same weights on both sides, from seeds, and a tokenizer made here."""

QUERY, RESPONSE, ROWS, VOCAB = 16, 32, 32, 2000


def gpt2(
    seed: int,
    layers: int = 4,
    width: int = 128,
    vocab: int = VOCAB,
    positions: int = 128,
    trunk: bool = False,
    **more,
):
    "A GPT-2 with random weights; without its head if a trunk is wanted. Dropout is 0."
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 32) if width < 768 else 12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    model = (GPT2Model if trunk else GPT2LMHeadModel)(config).eval()
    if not trunk:
        model.generation_config.pad_token_id = 0
    return model


def prompts(n: int, seed: int, query: int = QUERY, vocab: int = VOCAB) -> list[list[int]]:
    "n different ones, of equal length."
    import torch

    return torch.randint(vocab, (n, query), generator=torch.Generator().manual_seed(seed)).tolist()


def tokenizer(vocab: int = VOCAB, beyond: bool = False):
    "A word w17 for the id 17. `beyond`: one more, that no model here can write, to pad and to end with."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab + beyond)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"w{vocab}" if beyond else "w0"
    more = {"eos_token": last} if beyond else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=last, padding_side="left", **more
    )


def even_share(text: str, last: int = RESPONSE) -> float:
    "The reward: how many of the last words have an even number."
    return sum(w[-1] in "02468" for w in text.split()[-last:]) / last


def even_shares(texts: list[str]) -> list[float]:
    return [even_share(t) for t in texts]


def movement(model, seed: int, **size) -> float:
    "Σ|θ − θ₀|: how far training has taken a model from its seed."
    start = dict(gpt2(seed, **size).named_parameters())
    return sum(
        (p.detach() - start[name].detach()).abs().sum().item()
        for name, p in model.named_parameters()
    )
