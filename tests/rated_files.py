"""Rated sentences in the format of the real files, with their quirks, for tests of several folders."""
import random
import re

from instruct_goose.recipes.ratings import RATINGS, TEXTS

WORTH = {"superb": 3, "good": 2, "fine": 1, "long": 0, "dull": -2, "awful": -3}


def table(rows, bom=False, end="\r\n", last=""): return (b"\xef\xbb\xbf" if bom else b"") + (end.join("\t".join(r) for r in rows) + last).encode()


def write(directory, n=60, end="\r\n", last="", boms=(False, True)):
    "Odd numbers of raters, one row with 99, entities, accents, blanks, ids that are not numbers, rows in another order."
    rng, texts, ratings = random.Random(0), [], []
    for i in range(n):
        a, b = rng.choice(list(WORTH)), rng.choice(list(WORTH))
        scores = [max(-4, min(4, round(rng.gauss((WORTH[a] + WORTH[b]) / 2, 1)))) for _ in range(99 if i == 3 else 15 + rng.randrange(15))]
        mean = sum(scores) / len(scores)
        texts.append((f"{i % 7}_{i}", f"{mean:.12g}", f"A {a} film &amp;  a {b} fiancé,  nº {i} &#8211; &quot;so&quot; "))
        ratings.append((f"{i % 7}_{i}", f"{mean:.10g}", "1.0", str(scores)))
    rng.shuffle(ratings)
    directory.mkdir(exist_ok=True)
    (directory / TEXTS).write_bytes(table(texts, boms[0], end, last))
    (directory / RATINGS).write_bytes(table(ratings, boms[1], end, last))
    return directory


def edit(folder, name, pattern, replacement, flags=re.M):
    path = folder / name
    before = path.read_bytes()
    after = re.sub(pattern, replacement, before, count=1, flags=flags)
    assert after != before
    path.write_bytes(after)


def corpus(directory, prefix, n, words, seed, wrong_means=0, names=("said.tsv", "scores.tsv")):
    "An invented corpus in the format, of any names: what a sentence is worth stands in its words; some means are made up."
    rng, texts, ratings = random.Random(seed), [], []
    for i in range(n):
        picked = [rng.choice(list(words)) for _ in range(5)]
        truth = sum(words[w] for w in picked) / 2
        scores = [max(-4, min(4, round(rng.gauss(truth, 1)))) for _ in range(rng.randint(8, 14))]
        mean = sum(scores) / len(scores)
        texts.append((f"{prefix}{i}", "3.999" if i < wrong_means else f"{mean:.4f}", f"the {' and '.join(picked)} of it ."))
        ratings.append((f"{prefix}{i}", "0", "0", str(scores)))
    rng.shuffle(ratings)
    directory.mkdir(exist_ok=True)
    (directory / names[0]).write_bytes(table(texts, end="\n")); (directory / names[1]).write_bytes(table(ratings, bom=True))
    return directory


PRAISE = {"superb": 2, "lovely": 2, "fine": 1, "plain": 0, "slow": -1, "dreadful": -2}
CODE = {"ba": 2, "be": 2, "bi": 1, "bo": 0, "bu": -1, "by": -2}  # words that no lexicon knows
