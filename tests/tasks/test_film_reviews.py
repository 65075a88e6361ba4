"""The grammar, the ratings and the judges, against a second grammar written out by hand and against enumeration."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instruct_goose.tasks import film_reviews
from instruct_goose.tasks.film_reviews import (
    NEGATIVE,
    POSITIVE,
    grammatical,
    human_score,
    rated_words,
    rater_pairs,
    ratings,
    vocabulary,
    write_reviews,
)

# A second grammar, in its own notation: word by word, ? a word of the mood, ! one of the opposite, @ an article.
SHAPES = """
the PART is ?adj
the PART is ?adj and the PART is ?adj
the PART is ?adj but the PART is !adj
it is @ ?adj KIND
it is @ ?adj and ?adj KIND
it is @ ?noun with @ ?adj PART
the KIND opens ?adv and ends ?adv
this KIND is ?adj from start to finish
the MOVER MOVES ?adv
what @ ?adj KIND this is
i found the PART ?adj and the KIND @ ?noun
@ ?adj PART makes this KIND @ ?noun
every scene is ?adv MADE
@ ?adj KIND with @ ?adj PART
the KIND SEEMS ?adj but its PART is !adj
the PART and the PART are ?adj
"""
SHAPES = [[*line.split(), "."] for line in SHAPES.strip().splitlines()]
PLAIN_BY_HAND = {
    "KIND": {"film", "movie", "picture", "drama", "sequel", "remake", "feature"},
    "PART": {"plot", "script", "cast", "ending", "story", "premise", "finale", "soundtrack"},
    "MOVER": {"story", "plot", "action", "camera", "dialogue", "music"},
    "MOVES": {"moves", "flows", "unfolds", "builds", "ends"},
    "MADE": {"shot", "written", "paced", "acted", "staged", "edited"},
    "SEEMS": {"looks", "feels", "seems"},
}
MOODS = [{kind: set(words) for kind, words in mood.items()} for mood in (POSITIVE, NEGATIVE)]
SILENT_H, LIKE_YOU = ("honest", "honor", "hour", "heir"), ("use", "uni", "euro", "one", "once")


def sounds_like_a_vowel(word):
    return word.startswith(SILENT_H) or (word[0] in "aeiou" and not word.startswith(LIKE_YOU))


def reads_as(shape, words, moods):
    "Whether the words fit the shape, when a ? may be of any mood in moods[0] and a ! of any in moods[1]."
    if len(words) != len(shape):
        return False
    for i, (slot, word) in enumerate(zip(shape, words, strict=True)):
        if slot == "@":
            fits = word == ("an" if sounds_like_a_vowel(words[i + 1]) else "a")
        elif slot[0] in "?!":
            fits = any(word in MOODS[m][slot[1:]] for m in moods[slot[0] == "!"])
        elif slot.isupper():
            fits = word in PLAIN_BY_HAND[slot]
        else:
            fits = word == slot
        if not fits:
            return False
    return True


def parse(text, moods=((0, 1), (0, 1))):
    return any(reads_as(shape, text.split(" "), moods) for shape in SHAPES)


@cache
def opinions(text):
    "The distribution of a reader's rating, exactly: all choices of one rater per word."
    tables = [lexicon_file()[w] for w in text.split() if w in all_rated()]
    counts = Counter(Fraction(sum(choice), len(tables)) for choice in product(*tables))
    return {x: Fraction(k, 10 ** len(tables)) for x, k in counts.items()}


def beats(a, b):
    return sum(p * q for x, p in opinions(a).items() for y, q in opinions(b).items() if x > y)


@cache
def all_rated():
    return {w for mood in MOODS for words in mood.values() for w in words}


@cache
def lexicon_file():
    import vaderSentiment

    text = (Path(vaderSentiment.__file__).parent / "vader_lexicon.txt").read_text("utf-8")
    return {
        line.split("\t")[0]: tuple(map(int, re.findall(r"-?\d+", line.split("\t")[3])))
        for line in text.splitlines()
    }


def test_ratings_are_what_the_file_says():
    assert ratings() == lexicon_file()
    assert {len(x) for x in ratings().values()} == {10}
    assert all(-4 <= s <= 4 for x in ratings().values() for s in x)


def test_every_word_stands_in_one_list_and_on_its_side_of_zero():
    lists = [(mood, kind, words) for mood in (POSITIVE, NEGATIVE) for kind, words in mood.items()]
    assert max(Counter(w for *_, words in lists for w in words).values()) == 1
    for mood, _, words in lists:
        for w in words:
            assert re.fullmatch("[a-z]+", w) and (sum(lexicon_file()[w]) > 0) == (
                mood is POSITIVE
            ), w


REVIEWS = write_reviews(2_000, seed="the tests")


def test_the_writer_writes_only_what_the_second_grammar_reads():
    for review in REVIEWS:
        assert parse(review, moods=((0,), (1,))) or parse(review, moods=((1,), (0,))), (
            review
        )  # one mood, kept to
        rated = [w for w in review.split() if w in all_rated()]
        assert rated and len(set(rated)) == len(rated), review
        for words in PLAIN_BY_HAND.values():
            same = [w for w in review.split() if w in words]
            assert len(set(same)) == len(same) or "ends" in same, review


def test_the_writer_uses_every_word_and_every_template_about_equally():
    many = write_reviews(8_000, seed=3)
    assert {w for r in many for w in r.split()} == set(vocabulary())
    used = Counter(
        next(i for i, s in enumerate(SHAPES) if reads_as(s, r.split(), ((0, 1), (0, 1))))
        for r in many
    )
    assert (
        len(used) == 16 and sum((k - 500) ** 2 / 500 for k in used.values()) < 44.3
    )  # chi² with 15 degrees, p = 1e-4
    positive = sum(h > 0 for r, h in zip(many, human_score(many), strict=True) if " but " not in r)
    n = sum(" but " not in r for r in many)
    assert abs(positive - n / 2) < 4 * (n / 4) ** 0.5


def test_the_judge_accepts_every_review_and_what_the_writer_would_not_say():
    assert all(grammatical(REVIEWS))
    assert all(
        grammatical(
            ["the plot is good but the plot is good .", "it is a bore with a superb cast ."]
        )
    )


def mutants(review, rng):
    words = review.split()
    i = rng.randrange(len(review.split()))
    j = rng.randrange(len(review.split()))
    yield "drop", words[:i] + words[i + 1 :]
    yield "repeat", words[:i] + [words[i]] + words[i:]
    yield "insert", words[:i] + [rng.choice(vocabulary())] + words[i:]
    yield "replace", words[:i] + [rng.choice(vocabulary())] + words[i + 1 :]
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    yield "swap", swapped
    yield "cut", words[:i]
    yield "go on", words + rng.choice(REVIEWS).split()
    for k, w in enumerate(words):
        if w in ("a", "an"):
            yield "article", words[:k] + [{"a": "an", "an": "a"}[w]] + words[k + 1 :]


def test_judge_and_second_grammar_agree_on_thousands_of_broken_reviews():
    rng = random.Random(5)
    verdicts = Counter()
    for review in REVIEWS[:1_500]:
        for name, words in mutants(review, rng):
            text = " ".join(words)
            said = grammatical([text])[0]
            assert said == parse(text), (name, text)
            verdicts[name, said] += 1
    for name in ("drop", "repeat", "cut", "go on", "article"):
        assert verdicts[name, True] == 0 < verdicts[name, False], name
    for name in ("replace", "swap"):
        assert verdicts[name, True] > 25, (
            name
        )  # many of these are still sentences: the agreement is not trivial


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ".",
        "the plot is good",
        "the plot is good.",
        " the plot is good .",
        "the plot is good . ",
        "the plot is good .\n",
        "The plot is good .",
        "the  plot is good .",
        "the plot is good . .",
        "the plot is film .",
        "the plot was good .",
        "it is a awful film .",
        "it is an useless film .",
        "it is a honest film .",
        "drama drama gracefully",
        "a film with good plot .",
        "the plot are good .",
    ],
)
def test_these_are_not_sentences(text):
    assert grammatical([text]) == [False] and not parse(text)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(vocabulary()), max_size=12), st.randoms(use_true_random=False))
def test_human_score_is_a_mean_over_rated_words_in_any_order(words, rng):
    tens = [sum(lexicon_file()[w]) for w in words if w in all_rated()]
    mean = Fraction(sum(tens), 10 * len(tens)) if tens else 0
    shuffled = rng.sample(words, len(words))
    for text in (words, shuffled, [*words, "film", "and"]):
        assert human_score([" ".join(text)])[0] == pytest.approx(float(mean), abs=1e-12)
    assert sorted(rated_words(" ".join(shuffled))) == sorted(w for w in words if w in all_rated())


THREE = [
    "the plot is great .",
    "the plot is good .",
    "the cast is flawless but the story is awful .",
]


def test_pairs_are_chosen_as_often_as_enumeration_says():
    "Texts are drawn evenly and a tie draws both again, so a pair's share is its chance of a strict win, over the sum of all."
    n = 20_000
    share = {(a, b): beats(a, b) for a, b in permutations(THREE, 2)}
    total = sum(share.values())
    drawn = Counter((p["chosen"], p["rejected"]) for p in rater_pairs(THREE, n, seed=4))
    assert set(drawn) == set(share)
    for pair, w in share.items():
        p = float(w / total)
        assert abs(drawn[pair] - n * p) < 4.5 * (n * p * (1 - p)) ** 0.5, pair


def test_the_draws_depend_on_nothing_else_touch_nothing_and_have_not_changed():
    "The numbers in the lessons come from these draws."
    code = f"""if True:
        import random, runpy
        m = runpy.run_path({film_reviews.__file__!r})
        state = random.getstate()
        reviews = m['write_reviews'](400)
        print(*reviews, *m['vocabulary'](), *m['rater_pairs'](reviews, 50), sep='|')
        assert random.getstate() == state
    """
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": h},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for h in "12"
    ]
    assert out[0] == out[1] and out[0].startswith("|".join(write_reviews(400)))
    assert write_reviews(2) == [
        "a boring picture with a petty soundtrack .",
        "what a noisy picture this is .",
    ]


@pytest.mark.parametrize("texts", [[], ["the plot is good .", "the cast is good ."]])
def test_reviews_that_raters_cannot_tell_apart_are_refused_not_drawn_for_ever(texts):
    with pytest.raises(ValueError, match="different human scores"):
        rater_pairs(texts, 3)
