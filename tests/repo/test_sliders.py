"""The sliders as they are stored: each frame worked out again in plain Python, without the library, and fit for a phone."""

import base64
import json
import math
import re
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "docs"))
from lessons import read_pages  # noqa: E402

PLOTLY = "application/vnd.plotly.v1+json"


@cache
def everything() -> dict[str, dict]:
    "cell id -> the figure, of all lessons"
    return {
        c.id: o["data"][PLOTLY]
        for p in read_pages()[1]
        for c in p.cells
        for o in c.outputs
        if PLOTLY in o.get("data", {})
    }


def values(x):
    "A curve as numbers; NumPy arrays are stored as bytes."
    return (
        np.frombuffer(base64.b64decode(x["bdata"]), np.dtype(x["dtype"])).tolist()
        if isinstance(x, dict)
        else list(x)
    )


def frames(key: str) -> dict[str, tuple[list[dict], str]]:
    "label -> the curves when the slider stands there, and the title"
    figure = everything()[key]
    found = {}
    for step in figure["layout"]["sliders"][0]["steps"]:
        curves = [
            {k: values(v) if k in ("x", "y") else v for k, v in c.items()} for c in figure["data"]
        ]
        title = figure["layout"].get("title", {})
        title = title.get("text", "") if isinstance(title, dict) else title
        if step["method"] == "animate":
            frame = next(f for f in figure["frames"] if f["name"] == step["args"][0][0])
            for i, c in zip(frame["traces"], frame["data"]):
                curves[i] |= {k: values(c[k]) for k in ("x", "y") if k in c}
            title = (frame.get("layout") or {}).get("title", {}).get("text", title)
        else:
            changes, *_, which = *step["args"], list(range(len(curves)))
            if isinstance(step["args"][-1], list):
                which = step["args"][-1]
            for name, rows in changes.items():
                for i, row in zip(which, rows):
                    if row is not None:
                        curves[i][name] = values(row)
            if step["method"] == "update":
                title = step["args"][1]["title.text"]
        found[step["label"]] = curves, title
    return found


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d*\.\d+|-?\d+", text.replace("−", "-"))]


def close(got, expected, atol=6e-4):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None) and (
            a is None or math.isclose(a, b, rel_tol=6e-4, abs_tol=atol)
        ), (got, expected)


# --- all of them ------------------------------------------------------------------------------------------------------
def test_there_are_sliders():
    assert len(everything()) >= 18 and all(
        f["layout"].get("sliders") for f in everything().values()
    )


@pytest.mark.parametrize("key", everything())
def test_a_slider_moves_something_and_fits_a_phone(key):
    layout = everything()[key]["layout"]
    made = frames(key)
    assert 5 <= len(made) <= 13
    shown = [json.dumps(curves) for curves, _ in made.values()]
    assert len(set(shown)) > 1 and max(map(len, made)) <= 5
    for _, title in made.values():
        assert max(len(line) for line in title.split("<br>")) <= 50, title
    for name, axis in layout.items():
        if (
            not re.fullmatch(r"[xy]axis\d*", name)
            or "range" not in axis
            or axis.get("type") == "log"
        ):
            continue
        low, high = sorted(axis["range"])
        own = [
            c
            for curves, _ in made.values()
            for c in curves
            if c.get(f"{name[0]}axis", name[0]) == name.replace("axis", "")
        ]
        inside = [
            low <= v <= high for c in own for v in c.get(name[0], []) if isinstance(v, float | int)
        ]
        assert sum(inside) >= 0.99 * len(inside), (
            f"{name}: {len(inside) - sum(inside)} points are outside {low}..{high}"
        )


# --- from a reward to PPO ---------------------------------------------------------------------------------------------
START, POINTS = (0.2, 0.5, 0.3), (5.0, 1.0, 3.0)


def test_batch_noise():
    pushes = [
        (r * ((a == 0) - 0.2), r * ((a == 1) - 0.5), r * ((a == 2) - 0.3))
        for a, r in enumerate(POINTS)
    ]
    assert pushes[0][:2] == (4.0, -2.5)
    mean = [sum(p * g[k] for p, g in zip(START, pushes)) for k in range(3)]
    one = sum(p * sum((g[k] - mean[k]) ** 2 for k in range(3)) for p, g in zip(START, pushes))
    for n, (curves, title) in frames("d4a600a1").items():
        n = int(n)
        (x, y) = (curves[0]["x"], curves[0]["y"])
        assert len(x) == len(y) == 100 and numbers(title) == pytest.approx(
            [(one / n) ** 0.5, math.hypot(*mean)], abs=0.006
        )
        assert (
            math.hypot(sum(x) / 100 - mean[0], sum(y) / 100 - mean[1]) < 4 * (one / n / 100) ** 0.5
        )
        if n > 2:
            continue
        places = [
            [sum(pushes[a][k] for a in words) / n for k in (0, 1)]
            for words in product(range(3), repeat=n)
        ]
        assert all(any(abs(a - p) + abs(b - q) < 2e-3 for p, q in places) for a, b in zip(x, y))


def test_three_walks_and_the_star():
    def plane(p):
        return (0.5 * p[0] + p[2], 3**0.5 / 2 * p[0])

    for label, (curves, title) in frames("d4fcb77e").items():
        tilted = [p * math.exp(r / float(label)) for p, r in zip(START, POINTS)]
        star = [p / sum(tilted) for p in tilted]
        assert numbers(title) == pytest.approx(star, abs=0.006)
        ppo, grpo, plain, best = curves[1:]
        close([best["x"][0], best["y"][0]], plane(star))
        missed = []
        for walk in (ppo, grpo, plain):
            close([walk["x"][0], walk["y"][0]], plane(START))
            missed.append(math.hypot(walk["x"][-1] - best["x"][0], walk["y"][-1] - best["y"][0]))
        assert (
            missed[0] < 0.05 and missed[2] < 0.05 and missed[1] > 2 * max(missed[0], missed[2])
        ), (label, missed)
        assert grpo["y"][-1] < best["y"][0]  # it stops short of what the formula gives to good


# --- masks ------------------------------------------------------------------------------------------------------------
def test_length_bias():
    def learn(divide, steps):
        z = 0.0
        path = []
        for _ in range(steps + 1):
            stop = 1 / (1 + math.exp(-z))
            go = 1 - stop
            slopes = (1 - stop, -stop)  # of log σ(z) and log σ(−z)
            path.append([stop, go * stop, go * go])
            push = 0.0
            for tokens in ((1,), (0, 1), (0, 0, 1), (0, 0, 0)):
                chance = math.prod(stop if t else go for t in tokens)
                push += (
                    chance
                    * sum(slopes[0] if t else slopes[1] for t in tokens)
                    / (len(tokens) if divide else 3)
                )
            z -= push
        return path

    mean, total = learn(True, 200), learn(False, 200)
    for label, (curves, title) in frames("d4a60012").items():
        close(curves[0]["y"], mean[int(label)])
        close(curves[1]["y"], total[int(label)])
        long = [sum(n * p for n, p in zip((1, 2, 3), path[int(label)])) for path in (mean, total)]
        assert numbers(title) == pytest.approx(long, abs=0.006)


def test_whitening_over_pads():
    five = [0.5, 0.6, 0.8, 0.1, -0.2]

    def white(x):
        m = sum(x) / len(x)
        s = (sum((v - m) ** 2 for v in x) / (len(x) - 1)) ** 0.5
        return [(v - m) / s for v in x]

    for label, (curves, _) in frames("d4a60022").items():
        close(curves[0]["y"], white(five))
        close(curves[1]["y"], white(five + [0.0] * (1 + 2 * int(label)))[:5])


# --- log-probabilities ------------------------------------------------------------------------------------------------
def test_temperature():
    seen = []
    for label, (curves, _) in frames("4b589e9f").items():
        raw = [p ** (1 / float(label)) for p in (0.55, 0.30, 0.15)]
        p = [x / sum(raw) for x in raw]
        close(curves[0]["y"], p, 1e-5)
        seen.append((float(label), -sum(x * math.log(x) for x in p)))
        assert curves[2]["x"] == [float(label)]
        close(curves[2]["y"], [seen[-1][1]], 1e-5)  # the dot
    close(curves[1]["x"], [tau for tau, _ in seen])
    close(curves[1]["y"], [S for _, S in seen], 1e-5)
    assert max(S for _, S in seen) < math.log(3)


# --- KL ---------------------------------------------------------------------------------------------------------------
def test_the_path_and_three_gradients():
    "Each gradient on the logits written down: π(k − mean k) for a penalty held fixed, π − π_ref for k3 differentiated."
    pi, ref = (0.3, 0.2, 0.5), (0.5, 0.25, 0.25)
    made = frames("32754fb3")
    for label, (curves, _) in made.items():
        raw = [q * (p / q) ** float(label) for p, q in zip(pi, ref)]
        p = [x / sum(raw) for x in raw]
        k1 = [math.log(a / b) for a, b in zip(p, ref)]
        k3 = [b / a - 1 + math.log(a / b) for a, b in zip(p, ref)]

        def held(k, p=p):
            return [a * (x - sum(b * y for b, y in zip(p, k))) for a, x in zip(p, k)]

        for curve, expected in zip(
            curves, (ref, p, held(k1), [a - b for a, b in zip(p, ref)], held(k3)), strict=True
        ):
            close(curve["y"], expected, 1e-5)
    far = made["4"][0]
    assert far[2]["y"][2] > 0 > far[4]["y"][2]  # k3 in the reward ends up pointing the other way


def test_kl_both_ways():
    pi, ref = (0.3, 0.2, 0.5), (0.5, 0.25, 0.25)

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q))

    for label, (curves, title) in frames("d4a60032").items():
        raw = [q * (p / q) ** float(label) for p, q in zip(pi, ref)]
        p = [x / sum(raw) for x in raw]
        for curve, sign in zip(curves[:2], (1, -1)):
            ell = [sign * math.log(a / b) for a, b in zip(p, ref)]
            each = [ell, [x * x / 2 for x in ell], [math.exp(-x) - 1 + x for x in ell]]
            close(curve["y"], [sum(a * k for a, k in zip(p, ks)) for ks in each])
        close([curves[2]["y"][0], curves[3]["y"][0]], [kl(p, ref), kl(ref, p)])
        assert numbers(title) == pytest.approx([kl(p, ref), kl(ref, p)], abs=6e-5)


def test_learning_curves_under_beta():
    "The gradient by the score function, where the library's lesson differentiates the sum."
    base = [[0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.5, 0.25, 0.25]]  # at first; after good; after bad
    paths = [
        ((0, 0), (1, 0)),
        ((0, 0), (1, 1)),
        ((0, 0), (1, 2)),
        ((0, 1), (2, 0)),
        ((0, 1), (2, 1)),
        ((0, 1), (2, 2)),
        ((0, 2),),
    ]
    score = [1, 0, 1, 0, -1, -1, 0]

    def run(beta):
        z = [[math.log(p) for p in row] for row in base]
        log = []
        for _ in range(200):
            pi = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in z]
            chance = [math.prod(pi[n][a] for n, a in path) for path in paths]
            ell = [sum(math.log(pi[n][a] / base[n][a]) for n, a in path) for path in paths]
            log.append(
                (sum(p * s for p, s in zip(chance, score)), sum(p * e for p, e in zip(chance, ell)))
            )
            for path, p, s, e in zip(paths, chance, score, ell):
                for n, a in path:
                    for v in range(3):
                        z[n][v] += p * (s - beta * e) * ((v == a) - pi[n][v])
        return log

    for label in (".1", "1", "5"):
        curves, title = frames("d4a60042")["0" + label if label[0] == "." else label]
        log = run(float(label))
        beta = float(label)
        for which, curve in ((0, curves[0]), (1, curves[2])):
            close(curve["y"], [log[int(s)][which] for s in curve["x"]], 2e-3)
        ref = [math.prod(base[n][a] for n, a in path) for path in paths]
        raw = [q * math.exp(s / beta) for q, s in zip(ref, score)]
        best = [x / sum(raw) for x in raw]
        close(curves[1]["y"], [sum(p * s for p, s in zip(best, score))] * len(curves[1]["y"]))
        close(
            curves[3]["y"],
            [sum(p * math.log(p / q) for p, q in zip(best, ref))] * len(curves[3]["y"]),
        )
        assert numbers(title)[1:] == pytest.approx(log[-1], abs=0.006)


# --- advantages -------------------------------------------------------------------------------------------------------
def test_gae_against_the_truth():
    words = list(product((1, -1), repeat=6))
    chance = [math.prod(0.6 if w > 0 else 0.4 for w in row) for row in words]
    for label, (curves, title) in frames("d4a60052").items():
        lam = float(label)
        advantages = []
        for row in words:
            V = [0.5 * (sum(row[:t]) + 0.2 * (6 - t)) / 6 for t in range(6)] + [0.0]
            delta = [(sum(row) / 6 if t == 5 else 0.0) + V[t + 1] - V[t] for t in range(6)]
            advantages.append(
                [sum(lam ** (u - t) * delta[u] for u in range(t, 6)) for t in range(6)]
            )
        for curve, sign in zip(curves[:2], (1, -1)):
            means, spreads = [], []
            for t in range(6):
                w = [p * (row[t] == sign) for p, row in zip(chance, words)]
                m = sum(a * A[t] for a, A in zip(w, advantages)) / sum(w)
                means.append(m)
                spreads.append(
                    max(0.0, sum(a * A[t] ** 2 for a, A in zip(w, advantages)) / sum(w) - m * m)
                    ** 0.5
                )
            close(curve["y"], means)
            close(curve["error_y.array"], spreads, 2e-3)
        apart = sum(g - b for g, b in zip(curves[0]["y"], curves[1]["y"])) / 6
        assert numbers(title)[0] == pytest.approx(apart, abs=6e-4)
    assert apart == pytest.approx(1 / 3, abs=1e-3)  # at λ = 1


def test_lambda_within_one_response():
    row = (1, 1, -1, 1, -1, -1)
    V = [0.5 * (sum(row[:t]) + 0.2 * (6 - t)) / 6 for t in range(6)] + [0.0]
    delta = [(sum(row) / 6 if t == 5 else 0.0) + V[t + 1] - V[t] for t in range(6)]
    for label, (curves, _) in frames("636cdd50").items():
        A = [sum(float(label) ** (u - t) * delta[u] for u in range(t, 6)) for t in range(6)]
        close(curves[0]["y"], A, 1e-5)
        assert curves[0]["marker.color"] == ["#12a150" if x > 0 else "#ea7a1a" for x in A], label
    assert max(A) < 0  # at λ = 1 all are blamed


# --- policy and value loss --------------------------------------------------------------------------------------------
def test_epsilon():
    rho, praise = (1.1, 1.5, 0.7, 0.6, 1.1), (1, 1, 1, -1, -1)
    cuts = []
    for label, (curves, _) in frames("0392c391").items():
        eps = float(label)

        def value(r, s, eps=eps):
            return min(s * r, s * min(max(r, 1 - eps), 1 + eps))

        for curve, sign in zip(curves[:2], (1, -1)):
            close(curve["y"], [value(r, sign) for r in curve["x"]], 1e-5)
        close(curves[2]["x"], rho)
        close(curves[2]["y"], [value(r, s) for r, s in zip(rho, praise)], 1e-5)
        cut = [r > 1 + eps if s > 0 else r < 1 - eps for r, s in zip(rho, praise)]
        assert list(curves[2]["marker.symbol"]) == [
            "circle-open" if c else "circle" for c in cut
        ], label
        cuts.append(sum(cut))
    assert cuts[0] == 3 and cuts[-1] == 0 and sorted(cuts, reverse=True) == cuts


def test_dual_clip():
    for label, (curves, _) in frames("d4a60062").items():
        c = math.inf if label == "none" else float(label)
        rho = curves[0]["x"]
        close(curves[0]["y"], [max(-max(r, 0.8), -c) for r in rho])
        assert curves[1]["y"] == [float(0.8 < r < c) for r in rho]


def test_ratios_of_long_responses():
    "By counting: of T tokens k go up in C(T, k) of 2^T ways."
    for label, (curves, title) in frames("d4a600b2").items():
        T = int(label)
        ways = [math.comb(T, k) for k in range(T + 1)]
        product = [math.exp(k * math.log(1.1) + (T - k) * math.log(0.9)) for k in range(T + 1)]
        mean = [math.exp((k * math.log(1.1) + (T - k) * math.log(0.9)) / T) for k in range(T + 1)]
        below = [
            next(k for k in range(T + 1) if 23 * sum(ways[: k + 1]) >= i * 2**T)
            for i in range(1, 23)
        ]
        token, geometric, whole = curves
        assert (token["x"], token["y"]) == ([0.9, 0.9, 1.1, 1.1], [0, 0.5, 0.5, 1])
        close(geometric["x"], [mean[k] for k in below])
        close(whole["x"], [product[k] for k in below], 0)
        for curve in (geometric, whole):
            close(curve["y"], [i / 23 for i in range(1, 23)])
        chance = [w / 2**T for w in ways]
        out = 100 * sum(p for p, r in zip(chance, product) if not 0.8 <= r <= 1.2)
        m = sum(p * s for p, s in zip(chance, mean))
        assert numbers(title)[2:4] == pytest.approx([out, 0], abs=0.51)
        assert numbers(title)[4] == pytest.approx(
            sum(p * (s - m) ** 2 for p, s in zip(chance, mean)) ** 0.5, abs=6e-5
        )
    assert out > 90 and whole["x"][10] < 0.135  # at 400 tokens, where the average is still 1


def test_cap_of_the_weights():
    "The gradient of one token by hand: its weight, its worth, and 1 at its own logit less π everywhere."
    pi, mu, worth = (0.5, 0.25, 0.25), (0.6, 0.39, 0.01), (1, 0, -1)
    truth = [p * (f - 0.25) for p, f in zip(pi, worth)]

    def parts(C):
        g = [
            [min(p / m, C) * f * ((k == a) - pi[k]) for k in range(3)]
            for a, (p, m, f) in enumerate(zip(pi, mu, worth))
        ]
        mean = [sum(m * row[k] for m, row in zip(mu, g)) for k in range(3)]
        return math.dist(mean, truth), sum(m * math.dist(row, mean) ** 2 for m, row in zip(mu, g))

    sizes = [4**i for i in range(9)]
    made = frames("d4a600c2")
    for label, (curves, title) in made.items():
        bias, variance = parts(math.inf if label == "none" else float(label))
        for curve in curves:
            close(curve["x"], sizes)
        close(curves[0]["y"], [(parts(math.inf)[1] / n) ** 0.5 for n in sizes])
        close(curves[1]["y"], [(bias**2 + variance / n) ** 0.5 for n in sizes], 0)
        close(curves[2]["y"], [None if label == "none" else bias] * 9)
        assert numbers(title.replace(",0", "0"))[1::2] == pytest.approx(
            [(bias**2 + variance / n) ** 0.5 for n in (16, 10_000)], abs=6e-4
        )
    error = {label: numbers(title)[1::3] for label, (_, title) in made.items()}
    assert (
        min(error, key=lambda k: error[k][0]) == "3"
        and min(error, key=lambda k: error[k][1]) == "none"
    )


def test_value_clip():
    def learn(target, c):
        v = 0.0
        shares = [0.0]
        for _ in range(12):
            old = v
            for _ in range(10):
                held = abs(v - old) > c and abs(min(max(v, old - c), old + c) - target) > abs(
                    v - target
                )
                v -= 0.0 if held else 0.05 * (v - target)
            shares.append(v / target)
        return shares

    for label, (curves, title) in frames("d4a60071").items():
        shares = [
            learn(target, math.inf if label == "none" else float(label))
            for target in (0.1, 1.0, 10.0)
        ]
        for curve, path in zip(curves, shares):
            close(curve["y"], path)
        assert numbers(title)[1:] == pytest.approx([path[4] for path in shares], abs=0.006)


# --- groups and pairs -------------------------------------------------------------------------------------------------
def test_group_std():
    for label, (curves, _) in frames("d4a60082").items():
        k = int(label)
        p, s = k / 8, (k * (8 - k) / 8 / 7) ** 0.5
        both = [1 - p if k else None, -p if k < 8 else None]
        close(curves[0]["y"], both)
        close(curves[1]["y"], [None if x is None else x * 8 / 7 for x in both])
        close(curves[2]["y"], [None if x is None else x / (s or 1) for x in both])  # x = 0 if s = 0


def test_dpo_margin():
    margin = 0.5 * math.log(8)
    for label, (curves, title) in frames("d4a60092").items():
        a, b = (x * math.exp(-float(label)) for x in (0.40, 0.05))
        close(curves[0]["y"], [a, b, 1 - a - b])
        assert numbers(title) == pytest.approx([margin, math.log(1 + math.exp(-margin))], abs=6e-5)
