"Ridge regression on words, beside which the records put reward models."

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

from instruct_goose.recipes.ratings import Review, both_margins


def ridge_shares(
    train: Sequence[Review], held_out: Sequence[Review], penalty: float = 1.0
) -> dict[str, float]:
    """The share of held-out pairs in the raters' order by score(x) = b + Σ w·tfidf(word), w = argmin Σ(score − mean rating)² + λ|w|².
    Word presence times inverse document frequency, rows of length 1; conjugate gradients (Hestenes & Stiefel 1952)."""

    def words(text):
        return set(re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower()))

    seen = Counter(word for r in train for word in words(r.text))
    column = {word: i for i, word in enumerate(sorted(seen))}
    n = torch.tensor([seen[word] for word in column], dtype=torch.float64)
    idf = ((1 + len(train)) / (1 + n)).log()

    def matrix(reviews):  # sparse (texts, words), without unknown words
        bags = [sorted(column[word] for word in words(r.text) & seen.keys()) for r in reviews]
        where = torch.tensor([(i, c) for i, bag in enumerate(bags) for c in bag]).view(-1, 2)
        values = torch.cat([normalize(idf[bag], dim=0) for bag in bags])
        return torch.sparse_coo_tensor(
            where.T.long(), values, (len(bags), len(column)), check_invariants=True
        )

    X = matrix(train)
    y = n.new_tensor([r.mean for r in train])
    b = X.T @ (y - y.mean())
    w = torch.zeros_like(b)
    r = b
    p = b
    rr = b @ b
    while rr > 1e-16 * (b @ b):
        Ap = X.T @ (X @ p) + penalty * p
        step = rr / (p @ Ap)
        w, r = w + step * p, r - step * Ap
        rr, before = r @ r, rr
        p = r + rr / before * p
    return both_margins((matrix(held_out) @ w + y.mean()).tolist(), [r.mean for r in held_out])
