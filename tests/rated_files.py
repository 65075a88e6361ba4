"Rated sentences in the format of the real files, for tests of several folders."

import random

from instruct_goose.recipes.ratings import RATINGS, TEXTS

WORTH = {"superb": 2, "lovely": 2, "fine": 1, "plain": 0, "slow": -1, "dreadful": -2}


def corpus(directory, n=60, seed=0, end="\n", mark=""):
    "What a sentence is worth stands in its words. Ids are no numbers, ratings stand in another order, texts have entities and blanks."
    rng = random.Random(seed)
    texts = []
    ratings = []
    for i in range(n):
        picked = [rng.choice(list(WORTH)) for _ in range(5)]
        scores = [
            max(-4, min(4, round(rng.gauss(sum(WORTH[w] for w in picked) / 2, 1))))
            for _ in range(rng.randint(8, 14))
        ]
        texts.append(f"{i % 7}_{i}\t0\tthe  {' &amp; '.join(picked)}  of it &#8211; fiancé.")
        ratings.append(f"{i % 7}_{i}\t0\t0\t{scores}")
    rng.shuffle(ratings)
    directory.mkdir(exist_ok=True)
    for name, rows in ((TEXTS, texts), (RATINGS, ratings)):
        (directory / name).write_bytes((mark + end.join(rows)).encode())
    return directory
