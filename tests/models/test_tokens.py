"Padding, masks, tokenizers and data sets; what they must keep is counted by hand."

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.models.tokens import (
    PairDataset,
    PromptDataset,
    as_mask,
    compact,
    pad,
    word_tokenizer,
)

WORDS = "the a film plot is good bad dull".split()
SIDES = st.sampled_from(["left", "right"])
MASKS = st.integers(1, 7).flatmap(
    lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=4)
)


@pytest.fixture
def words():
    return word_tokenizer(WORDS, model_max_length=8)


# --- masks, positions, padding ---


@given(MASKS, SIDES, st.sampled_from([-100, 0, 9, 10**9]))
def test_compact_moves_tokens_and_nothing_else(rows, side, poison):
    mask = torch.tensor(rows)
    ids = torch.where(mask, torch.arange(mask.numel()).view(mask.shape), poison)
    moved, moved_mask = compact(ids, mask, side)
    for old, m, new, n in zip(ids, mask, moved, moved_mask, strict=True):
        kept = [x for x, real in zip(old.tolist(), m.tolist(), strict=True) if real]
        gap = int((~m).sum())
        assert new[n].tolist() == kept
        assert n.tolist() == (
            [False] * gap + [True] * len(kept)
            if side == "left"
            else [True] * len(kept) + [False] * gap
        )
        assert (new[~n] == poison).all()


def test_a_long_row_keeps_its_order():  # an unstable sort passes on short rows
    mask = torch.arange(5000)[None] % 3 > 0
    for side in ("left", "right"):
        ids, m = compact(torch.arange(5000)[None], mask, side)
        assert (ids[m].diff() > 0).all()


@pytest.mark.parametrize(
    "call, error, says",
    [
        (
            lambda: as_mask(torch.tensor([[-1, 2]]), "query_mask"),
            ValueError,
            "query_mask holds [-1, 2]",
        ),
        (lambda: pad([[1], [], [2], []], 0), ValueError, "[1, 0, 1, 0]"),
        (lambda: pad([], 0), ValueError, "lengths []"),
        (lambda: pad([[1]], 0, "up"), ValueError, "'up'"),
        (lambda: word_tokenizer(["x", "y", "x"]), ValueError, "'x' occurs twice"),
        (
            lambda: PromptDataset(["the film", ""], word_tokenizer(WORDS, add_bos=False)),
            ValueError,
            "prompt 1 is empty",
        ),
        (
            lambda: PromptDataset(["a"], word_tokenizer(["a"]), max_length=-8),
            ValueError,
            "max_length is -8",
        ),
        (
            lambda: PairDataset([("bad", "good " * 9)], word_tokenizer(WORDS, 8)),
            ValueError,
            "max_length of 8 tokens: pair 0 has 10 tokens",
        ),
        (
            lambda: PairDataset([("good", "bad"), {"chosen": "x"}], word_tokenizer(WORDS)),
            ValueError,
            "pair 1 is {'chosen': 'x'}",
        ),
    ],
)
def test_what_is_refused(call, error, says, unchecked):
    with unchecked(), pytest.raises(error) as e:
        call()
    assert says in str(e.value)


# --- data sets ---


def test_prompts_agree_with_the_tokenizers_own_padding(words):
    texts = ["the film is", "a", ""]
    data = PromptDataset(texts, words)
    batch = data.collate([data[i] for i in range(3)])
    theirs = words(texts, padding=True, return_tensors="pt")
    assert batch["query_ids"].tolist() == theirs["input_ids"].tolist()
    assert (
        batch["query_mask"].long().tolist() == theirs["attention_mask"].tolist()
        and batch["texts"] == texts
    )


def test_pairs_of_every_kind(words):
    pairs = PairDataset(
        [
            {"prompt": "the film is ", "chosen": "good", "rejected": "bad bad"},
            ("good", "dull"),
            ["a good film", "a film"],
            {"prompt": None, "chosen": "good", "rejected": ""},
        ],
        words,
    )
    batch = next(iter(torch.utils.data.DataLoader(pairs, batch_size=4, collate_fn=pairs.collate)))
    for side, texts in (
        ("chosen", ["the film is good", "good", "a good film", "good"]),
        ("rejected", ["the film is bad bad", "dull", "a film", ""]),
    ):
        for text, ids, mask in zip(texts, batch[f"{side}_ids"], batch[f"{side}_mask"], strict=True):
            assert words.decode(ids[mask], skip_special_tokens=True) == text
            assert mask.long().diff().le(0).all()  # padded on the right
