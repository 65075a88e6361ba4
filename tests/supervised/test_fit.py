"Oracles: CRC-32 bit by bit, counting, AdamW written out, and a run that was never stopped."

import math
from collections import Counter
from itertools import islice

import pytest
import torch
from states import Shelf

from instruct_goose.supervised.fit import batches, fit


@pytest.mark.parametrize("n, size", [(7, 3), (5, 5), (3, 8), (1, 1)])
def test_batches_by_rows_use_each_row_equally_often(n, size):
    drawn = list(islice(batches([1] * n, size, seed=3), n * 4))
    assert all(len(b) == size for b in drawn)
    assert Counter(sum(drawn, [])) == dict.fromkeys(range(n), 4 * size)
    assert drawn == list(islice(batches([9] * n, size, seed=3), n * 4))
    if n > 3:
        assert drawn != list(islice(batches([1] * n, size, seed=4), n * 4))


def test_batches_by_tokens_fit_and_cover_every_row_in_each_pass():
    lengths = torch.randint(1, 20, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    stream = batches(lengths, batch_tokens=40, seed=0)
    passes = []
    for _ in range(3):
        seen, order = [], []
        while len(seen) < 50:
            batch = next(stream)
            assert len(batch) * max(lengths[i] for i in batch) <= 40
            seen += batch
            order.append(tuple(batch))
        assert sorted(seen) == list(range(50))
        passes.append(order)
    assert passes[0] != passes[1] != passes[2]


def line():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


@pytest.mark.parametrize("steps, warmup", [(20, 1), (40, 2), (41, 2), (19, 0)])
def test_a_twentieth_of_the_steps_is_warmup(steps, warmup):
    model = line()
    lrs = [
        row["lr"]
        for row in fit(
            model,
            lambda rows: model(torch.ones(1, 2)).square().sum(),
            batches([1], 1),
            steps=steps,
            lr=0.1,
            progress=False,
        )
    ]
    rising = [0.1 * (k + 1) / warmup for k in range(warmup)]
    assert lrs[:warmup] == pytest.approx(rising)
    assert lrs[warmup] == pytest.approx(0.1)
    assert lrs[warmup + 1] < 0.1


def test_fit_is_adamw_by_hand():
    """Two parameters, written out: decay on the matrix, none on the bias, gradient clipped to
    length 1.
    """
    model = line().double()
    x = torch.tensor([[3.0, -1.0]]).double()
    y = torch.tensor([[9.0]]).double()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    log = fit(
        model,
        lambda rows: (model(x) - y).square().sum(),
        batches([1], 1),
        steps=12,
        lr=0.1,
        weight_decay=0.3,
        warmup=3,
        progress=False,
    )
    first, second = ({n: torch.zeros_like(v) for n, v in values.items()} for _ in range(2))
    for k in range(12):
        error = (x @ values["weight"].T + values["bias"] - y).item()
        g = {"weight": 2 * error * x, "bias": torch.tensor([2 * error]).double()}
        norm = math.sqrt(sum(v.square().sum().item() for v in g.values()))
        lr = 0.1 * ((k + 1) / 3 if k < 3 else 0.5 * (1 + math.cos(math.pi * (k - 3) / 9)))
        assert log[k] == pytest.approx(
            {"step": k, "loss": error**2, "lr": lr, "grad_norm": norm}, rel=1e-6
        )
        for n, v in values.items():
            d = g[n] * min(1.0, 1 / (norm + 1e-6))
            first[n], second[n] = 0.9 * first[n] + 0.1 * d, 0.99 * second[n] + 0.01 * d**2
            if n == "weight":
                v = v * (1 - lr * 0.3)
            m, s = first[n] / (1 - 0.9 ** (k + 1)), second[n] / (1 - 0.99 ** (k + 1))
            values[n] = v - lr * m / (s.sqrt() + 1e-8)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), values[n], atol=1e-9, rtol=1e-7)


def test_fit_goes_on_from_any_update_to_the_bit(tmp_path):
    """Dropout, a generator and a column of the loss's own, frozen weights, batches that end in the
    middle of a pass.
    """

    def train(directory, found=None):
        torch.manual_seed(1)
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
            torch.nn.Linear(1, 1),
        ).eval()
        net[3].requires_grad_(False)
        data = torch.randn(7, 3)
        dice = torch.Generator().manual_seed(2)
        shelf = Shelf(directory, found)

        def loss(batch):
            error = net(data[batch]) - torch.rand(len(batch), 1, generator=dice)
            return error.square().mean(), {"worst": error.abs().max().item()}

        seen = []
        history = fit(
            net,
            loss,
            batches(range(7), 3, seed=4),
            steps=9,
            lr=0.05,
            progress=False,
            stage=shelf,
            generators={"dice": dice},
            callback=lambda step, m: seen.append(step),
        )
        assert not net.training
        return (
            history,
            [p.detach().clone() for p in net.parameters()],
            torch.rand(2).tolist(),
            dice.get_state(),
            shelf,
            seen,
        )

    whole = train(tmp_path / "whole")
    assert list(whole[4].kept) == list(range(1, 10)) and list(whole[0][0]) == [
        "step",
        "loss",
        "worst",
        "lr",
        "grad_norm",
    ]
    for at, found in whole[4].kept.items():
        again = train(tmp_path / "again", found)
        assert again[0] == whole[0] and all(
            torch.equal(a, b) for a, b in zip(again[1], whole[1], strict=True)
        )
        assert again[2] == whole[2] and torch.equal(again[3], whole[3])
        assert again[5] == list(range(at, 9)) and list(again[4].kept) == list(range(at + 1, 10))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights(factor):
    model = line().eval()
    kept = []

    def loss_of(batch):
        assert model.training
        kept.append([p.detach().clone() for p in model.parameters()])
        return model(torch.ones(1, 2)).square().sum() * (factor if len(kept) == 3 else 1.0)

    with pytest.raises(FloatingPointError, match="words, step 2: the loss is"):
        fit(model, loss_of, batches([1], 1), steps=9, lr=0.1, desc="words", progress=False)
    assert all(p.equal(q) for p, q in zip(model.parameters(), kept[2], strict=True)) and not kept[
        2
    ][0].equal(kept[1][0])
    assert not model.training  # as before


def short_fit(directory, found=None, steps=4):
    net = line()
    shelf = Shelf(directory, found)
    history = fit(
        net,
        lambda rows: net(torch.ones(1, 2)).square().sum(),
        batches([1], 1),
        steps=steps,
        lr=0.1,
        progress=False,
        stage=shelf,
    )
    return history, net, shelf


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def broken_states(state):
    "Why it is refused, and a state that lacks something or holds something else."
    history = state["history"]
    learner = state["learner"]
    repeated = {name: column.repeat(4) for name, column in history.items()}
    model = without(learner["model"], "bias")
    yield "is not the state", state | {"history": without(history, "loss")}
    yield "history is None", state | {"history": None}
    yield "is not the state", state | {"history": history | {"lr": history["lr"][:1]}}
    yield "is not the state", state | {"history": repeated}
    yield "groups", state | {"learner": learner | {"moments": {}, "groups": []}}
    yield "another model's weights", state | {"learner": learner | {"model": model}}
    yield "torch is missing", state | {"generators": without(state["generators"], "torch")}


def test_another_stages_state_is_refused_before_anything_changes(tmp_path):
    kept = short_fit(tmp_path)[2].kept[2]
    for why, state in broken_states(kept):
        net = line()
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(ValueError, match=why):
            fit(
                net,
                lambda rows: None,
                batches([1], 1),
                steps=4,
                lr=0.1,
                progress=False,
                stage=Shelf(tmp_path, state),
            )
        assert all(p.equal(q) for p, q in zip(net.parameters(), before, strict=True)), why


def test_a_finished_stage_gives_back_its_log_and_its_model(tmp_path):
    history, net, shelf = short_fit(tmp_path)
    again, other, idle = short_fit(tmp_path, shelf.kept[4])
    assert (
        again == history
        and idle.kept == {}
        and all(p.equal(q) for p, q in zip(other.parameters(), net.parameters(), strict=True))
    )


@pytest.mark.parametrize(
    "lengths, options",
    [
        ([], dict(batch_size=1)),
        ([1], dict()),
        ([1], dict(batch_size=0)),
        ([1], dict(batch_size=1, batch_tokens=1)),
        ([1, 3], dict(batch_tokens=2)),
    ],
)
def test_batches_that_cannot_be_made_are_refused_at_once(lengths, options):
    with pytest.raises(ValueError, match="batch"):
        batches(lengths, **options)


def test_a_row_may_fill_a_batch_by_itself():
    assert sorted(islice(batches([3, 3], batch_tokens=3), 2)) == [[0], [1]]
    assert sorted(next(batches([3, 3], batch_tokens=6))) == [0, 1]


@pytest.mark.parametrize(
    "steps, lr", [(0, 0.1), (-1, 0.1), (1, 0.0), (1, -0.1), (1, math.inf), (1, math.nan)]
)
def test_no_steps_and_no_learning_rate_are_refused(steps, lr):
    model = line()
    with pytest.raises(ValueError, match="at least 1, and above 0 and finite"):
        fit(model, lambda rows: model(torch.ones(1, 2)).sum(), batches([1], 1), steps=steps, lr=lr)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_in_training_mode_while_it_learns_and_then_as_it_was(training):
    "Also where the loss raises."
    model = line().train(training)
    modes = []

    def loss(rows):
        modes.append(model.training)
        return model(torch.ones(1, 2)).sum()

    def fails(rows):
        raise KeyError("the data")

    fit(model, loss, batches([1], 1), steps=2, lr=0.1, progress=False)
    assert modes == [True, True]
    assert model.training == training
    with pytest.raises(KeyError):
        fit(model, fails, batches([1], 1), steps=1, lr=0.1, progress=False)
    assert model.training == training


def test_a_callback_hears_of_every_update_once_the_weights_have_moved():
    model = line()
    heard = []
    weights = [model.weight.detach().clone()]

    def listen(step, log):
        heard.append((step, log))
        weights.append(model.weight.detach().clone())

    history = fit(
        model,
        lambda rows: model(torch.ones(1, 2)).sum(),
        batches([1], 1),
        steps=3,
        lr=0.1,
        progress=False,
        callback=listen,
    )
    assert heard == list(enumerate(history))
    assert all(not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False))
