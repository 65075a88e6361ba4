"Padding, masks, tokenizers and data sets; what they must keep is counted by hand."

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instruct_goose.models.long_rows import RowsTooLong
from instruct_goose.models.tokens import (
    PairDataset,
    PromptDataset,
    as_mask,
    bpe_tokenizer,
    compact,
    encode_all,
    pad,
    pad_id_of,
    pair_texts,
    position_ids,
    require_fitting,
    token_limit,
    unpad,
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


ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@given(ROWS, SIDES, st.integers(0, 9))
def test_padding_fills_one_side_and_is_taken_away_again(rows, side, pad_id):
    ids, mask = pad(rows, pad_id, side)
    width = max(map(len, rows))
    for row, found, found_mask in zip(rows, ids.tolist(), mask.tolist(), strict=True):
        gap = width - len(row)
        filling, is_token = [pad_id] * gap, [True] * len(row)
        assert found == (filling + row if side == "left" else row + filling)
        empty = [False] * gap
        assert found_mask == (empty + is_token if side == "left" else is_token + empty)
    assert unpad(ids, mask) == unpad(ids, mask.long()) == rows
    assert pad([torch.tensor(row) for row in rows], pad_id, side)[0].equal(ids)


def test_entries_of_any_kind_are_unpadded_wherever_they_stand():
    x = torch.tensor([[0.5, 9, 1.5], [9, 9, 9], [2.5, 3.5, 9]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    assert unpad(x, mask) == [[0.5, 1.5], [], [2.5, 3.5]]


@pytest.mark.parametrize(
    "mask, positions",
    [
        ([1, 1, 1], [0, 1, 2]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 0, 0], [0, 1, 1, 1]),
        ([0, 1, 0, 1], [0, 0, 0, 1]),
    ],
)
def test_positions_count_tokens_from_zero(mask, positions):
    for dtype in (torch.bool, torch.long, torch.float32):
        assert position_ids(torch.tensor([mask], dtype=dtype)).tolist() == [positions]


def test_a_mask_of_zeros_and_ones_is_one_of_bools():
    for dtype in (torch.bool, torch.long, torch.float32):
        found = as_mask(torch.tensor([[0, 1, 1]], dtype=dtype))
        assert found.dtype == torch.bool and found.tolist() == [[False, True, True]]
    for other in (2.0, 0.5, -1.0):
        with pytest.raises(ValueError, match="only 0 .padding. and 1"):
            as_mask(torch.tensor([[0, 1, other]]))


# --- tokenizers ---


def test_a_word_tokenizer_has_its_special_tokens_first_and_then_the_words():
    tokenizer = word_tokenizer(["the", "film", "."], model_max_length=7)
    names = ["<pad>", "<bos>", "<eos>", "<unk>", "the", "film", "."]
    assert tokenizer.convert_ids_to_tokens(list(range(7))) == names and len(tokenizer) == 7
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 7)
    assert tokenizer("the other film")["input_ids"] == [1, 4, 3, 5]
    assert tokenizer.decode([4, 5, 6]) == "the film ."  # blanks stay where they are
    shared = word_tokenizer(["a"], pad="<end>", bos="<end>", eos="<end>")
    assert shared.convert_ids_to_tokens([0, 1, 2]) == ["<end>", "<unk>", "a"]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_texts_and_pairs_begin_and_end_as_they_are_asked_to(add_bos, add_eos):
    tokenizer = word_tokenizer(["a", "b"], add_bos=add_bos, add_eos=add_eos)
    begin, end = [1] * add_bos, [2] * add_eos
    assert tokenizer("a")["input_ids"] == [*begin, 4, *end]
    assert tokenizer("a", "b")["input_ids"] == [*begin, 4, 5, *end]
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == [4]


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "words is \\[\\]"),
        ("the film", "words is 'the film'"),
        (["a b"], "'a b' .* has a blank"),
        (["a "], "'a ' .* has a blank"),
        ([""], "'' .* has a blank"),
        (["<pad>"], "'<pad>' .* is a special token"),
    ],
)
def test_what_is_no_vocabulary(words, says):
    with pytest.raises(ValueError, match=says):
        word_tokenizer(words)


def test_pairs_of_bytes_that_occur_twice_are_merged():
    "Of 'aab aab' and 'xy': a a, then aa b, each as often as the text has it; xy stands there once."
    tokenizer = bpe_tokenizer(["aab aab", "xy"], 400, model_max_length=9)
    names = {*tokenizer.get_vocab()}
    assert {"aa", "aab"} <= names and "xy" not in names
    assert len(tokenizer) == 3 + 256 + 2
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<bos>", "<eos>"]
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 9)
    assert tokenizer.tokenize("aab") == ["aab"]  # no blank is put in front
    assert len(bpe_tokenizer(["aab aab"], 260)) == 260  # room for one merge


@given(st.text(max_size=9))
def test_every_text_has_byte_pairs_and_comes_back(text):
    assert BYTES.decode(BYTES(text)["input_ids"][1:]) == text
    assert LOWER("GoOd é")["input_ids"] == LOWER("good é")["input_ids"]


BYTES = bpe_tokenizer(["the film was good. "] * 3, 300, lowercase=False)
LOWER = bpe_tokenizer(["the film was good. "] * 3, 300)


@pytest.mark.parametrize("max_length, limit", [(None, 8), (1, 1), (9, 9), (0, None), (-1, None)])
def test_a_text_has_room_for_one_token_at_least(max_length, limit, words):
    if limit is None:
        with pytest.raises(ValueError, match=f"max_length is {max_length}: no prompt fits"):
            token_limit(words, max_length)
    else:
        assert token_limit(words, max_length) == limit


def test_texts_are_as_long_as_the_limit_and_no_longer(words):
    texts = ["the film", "a"]
    assert encode_all(texts, words, 3, "text {}".format) == [
        words(text)["input_ids"] for text in texts
    ]
    with pytest.raises(ValueError, match="^text 0 has 3 tokens, the limit is 2: 'the film'…"):
        encode_all(texts, words, 2, "text {}".format)
    with pytest.raises(TypeError, match="texts is one string"):
        encode_all("the film", words, 9, "text {}".format)
    with pytest.raises(ValueError, match="^row 1 is empty: 'x' has no tokens"):
        require_fitting([[1], []], ["w", "x"], 1, "row {}".format)


def test_the_padding_of_a_tokenizer_without_one_is_asked_for(words):
    assert pad_id_of(words) == 0
    words.pad_token = None
    with pytest.raises(ValueError, match="no pad token: set one"):
        pad_id_of(words)


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


def test_a_prompt_may_be_as_long_as_the_limit(words):
    texts = ["the film is", "a film"]
    data = PromptDataset(texts, words, max_length=4)
    assert len(data) == 2 and data[1] == {"text": "a film", "ids": words("a film")["input_ids"]}
    with pytest.raises(ValueError, match="prompt 0 has 4 tokens, the limit is 3"):
        PromptDataset(texts, words, max_length=3)
    with pytest.raises(ValueError, match="no prompts"):
        PromptDataset([], words)
    with pytest.raises(TypeError, match="prompts is one text"):
        PromptDataset("the film", words)


def test_both_texts_of_a_pair_have_its_prompt_in_front():
    pair = {"prompt": "the ", "chosen": "film", "rejected": "plot"}
    assert pair_texts(0, pair) == {"chosen": "the film", "rejected": "the plot"}
    assert pair_texts(0, ("film", "plot")) == {"chosen": "film", "rejected": "plot"}
    messages = [{"role": "assistant", "content": "film"}]
    for side in ("chosen", "rejected", "prompt"):
        with pytest.raises(ValueError, match="pair 3 holds messages"):
            pair_texts(3, pair | {side: messages})


@pytest.mark.parametrize("how, kept", [("cut", [0, 1, 2]), ("drop", [0, 2])])
def test_long_pairs_are_cut_or_left_out_and_the_others_keep_their_numbers(how, kept, words):
    answers = ["good", "bad bad bad bad", "a film"]
    pairs = [{"prompt": "the film is ", "chosen": x, "rejected": "dull"} for x in answers]
    with pytest.warns(RowsTooLong, match="1 of 3 pairs are beyond max_length of 7 tokens"):
        data = PairDataset(pairs, words, 7, how)
    assert data.numbers == kept and len(data) == len(kept)
    begin = words("the film is")["input_ids"]
    good, bad, dull = words.convert_tokens_to_ids(["good", "bad", "dull"])
    end = words.eos_token_id
    assert data[0] == {"chosen": [*begin, good], "rejected": [*begin, dull]}
    if how == "cut":  # the prompt gives way, and the longest answer keeps half of the limit
        assert data[1] == {"chosen": [*begin[1:], *[bad] * 4], "rejected": [*begin[1:], dull]}
    assert end not in data[0]["chosen"]  # a reward model reads what the tokenizer's call gives


def test_a_pair_without_tokens_or_without_a_list_is_refused():
    bare = word_tokenizer(WORDS, add_bos=False)
    for pair, side in (({"chosen": "", "rejected": "bad"}, "chosen"), (("bad", ""), "rejected")):
        with pytest.raises(ValueError, match=f"pair 1, {side} is empty"):
            PairDataset([("good", "bad"), pair], bare)
    with pytest.raises(ValueError, match="no pairs"):
        PairDataset([], bare)
