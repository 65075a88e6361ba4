"""Changes in place: what torch computes is computed, what torch refuses is refused, nothing is silent."""

from math import e

import page_tensors as page
import pytest
import torch
from page_tensors import NotOnThisPage

BOTH = pytest.mark.parametrize("library", [torch, page], ids=["torch", "page"])


@BOTH
def test_a_number_that_a_derivative_reads_must_not_change(library):
    x = library.tensor([1.0, 2.0], requires_grad=True)
    y = x.exp()
    loss = (y * y).sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@BOTH
def test_a_leaf_that_learns_must_not_change(library):
    x = library.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x[0] = 3.0
    with library.no_grad():
        x.add_(1)
    assert x.tolist() == [2.0, 3.0]


@BOTH
def test_a_change_in_place_has_a_gradient(library):
    x = library.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = x * 2
    y[1] = x[0] * 10
    y.exp_()
    (y * 0.1).sum().backward()
    expected = [0.2 * e**2 + e**10, 0.0, 0.2 * e**6]
    assert x.grad.tolist() == pytest.approx(expected, rel=1e-5)


@BOTH
def test_a_view_and_its_base_share_their_numbers(library):
    x = library.zeros(2, 3)
    x[0].add_(1)
    x.T[2] += library.tensor([5.0, 7.0])
    x.view(-1)[3:5] = 9
    x.detach().mul_(2)
    assert x.tolist() == [[2.0, 2.0, 12.0], [18.0, 18.0, 14.0]]


def test_a_change_of_a_view_with_a_gradient_is_refused_on_a_page():
    x = page.tensor([1.0, 2.0], requires_grad=True)
    y = x * 2
    first = y[0]
    with pytest.raises(NotOnThisPage, match="views"):
        first.mul_(3)
    with pytest.raises(NotOnThisPage, match="views"):
        y.mul_(3)


@BOTH
def test_a_graph_is_walked_once_unless_it_is_kept(library):
    x = library.tensor([1.0, 2.0], requires_grad=True)
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad.tolist() == [4.0, 8.0]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
