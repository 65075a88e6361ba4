"""What every lesson uses: the running example, checks that stop a test and not a reader, the verdict on a reader's function, sliders."""

import math
import re

import pytest
import torch

from instruct_goose import lesson


def test_the_running_example_is_the_notation_tables():
    ex = lesson.running_example()
    assert ex.logprobs[0].exp().tolist() == pytest.approx([0.55, 0.60, 0.35])
    assert ex.logprobs[1, :2].exp().tolist() == pytest.approx([0.15, 0.55])
    assert ex.old_logprobs[1, 1].item() == pytest.approx(math.log(0.5))
    assert ex.ref_logprobs[0, 0].item() == pytest.approx(math.log(0.4))
    for logits in (ex.logits, ex.old_logits, ex.ref_logits):
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 3).double())
    ex.values[0, 0] = 9.0
    assert lesson.running_example().values[0, 0] == 0.55  # made afresh


@pytest.mark.parametrize(
    "broken",
    [
        lambda: lesson.expect([1.0, 2.0], [1.0, 2.001]),
        lambda: lesson.expect([1.0], 1.0),
        lambda: lesson.expect(math.nan, 0.0),
        lambda: lesson.within([0.1, 0.9], 0.2, 1),
        lambda: lesson.within(math.nan, 0, 1),
        lambda: lesson.claim([]),
    ],
)
def test_what_differs_stops_a_test_and_not_a_reader(broken, monkeypatch, capsys):
    with pytest.raises(AssertionError):
        broken()
    monkeypatch.setattr(lesson, "at_the_keyboard", lambda: True)
    broken()
    assert "You changed something" in capsys.readouterr().out
    lesson.expect([1.0, math.nan], [1.00001, math.nan])
    lesson.within([0, 1], 0, 1)
    lesson.claim("so")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (lambda x: 2 * x, "right"),
        (lambda x: x + 2, "adds"),
        (lambda x: None, "nothing returned yet"),
        (lambda x: 6.0, "type: return a tensor, not float"),
        (lambda x: x[0], r"shape: yours is \(\)"),
        (lambda x: x / 0 if x.sum() > 99 else 1 / 0, "it raised ZeroDivisionError"),
        (lambda x: 5 * x, "not yet"),
    ],
)
def test_a_readers_mistake_gets_its_name(answer, verdict):
    x = torch.tensor([3.0, 1.0])
    assert re.match(
        verdict, lesson.diagnose(answer, x, right=[6.0, 2.0], mistakes={"adds": [5.0, 3.0]})
    )


def test_a_slider_begins_where_it_stands():
    import plotly.graph_objects as go

    figure = lesson.drag(
        go.Figure([go.Scatter(x=[0, 1], y=[0, 0])]),
        "a = ",
        [1, 2, 3],
        lambda a: ({"y": [[0, a / 3]]}, f"slope {a}"),
        2,
    )
    slider = figure.layout.sliders[0]
    assert slider.active == 1
    assert [step.label for step in slider.steps] == ["1", "2", "3"]
    assert list(figure.data[0].y) == [0, 0.6667]
    assert [step.args[0]["y"][0][1] for step in slider.steps] == [0.3333, 0.6667, 1.0]
    assert figure.layout.title.text == "slope 2"
