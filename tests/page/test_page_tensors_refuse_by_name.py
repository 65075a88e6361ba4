"""What page tensors lack is refused by name; what torch lacks, too, is an error as there."""

import page_tensors as page
import pytest
import torch
import torch_names
from page_tensors import NotOnThisPage
from page_tensors.torch_names import TENSOR, TORCH


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: page.einsum, "torch.einsum"),
        (lambda: page.zeros(2).lu(), "Tensor.lu"),
        (lambda: page.zeros(2).sum(out=1), "sum(out=…)"),
        (lambda: page.zeros(2, layout=1), "zeros(layout=…)"),
        (lambda: page.zeros(2, device="cuda"), "device('cuda')"),
        (lambda: page.nn.Linear, "torch.nn.Linear"),
        (lambda: page.optim.AdamW, "torch.optim.AdamW"),
        (lambda: page.autograd.grad(page.zeros(1), [], create_graph=True), "create_graph"),
        (lambda: page.tensor(1j), "complex"),
        (lambda: page.Generator().get_state, "Generator.get_state"),
    ],
)
def test_the_refusal_says_what_is_missing_and_where_to_go(call, name):
    with pytest.raises(NotOnThisPage) as refusal:
        call()
    assert name in str(refusal.value)
    assert "open the notebook" in str(refusal.value)


def test_a_misspelt_name_is_an_error_as_in_torch():
    for library in (torch, page):
        with pytest.raises(AttributeError, match="has no attribute 'nope'"):
            library.zeros(1).nope  # noqa: B018
        with pytest.raises(AttributeError, match="module 'torch' has no attribute 'nope'"):
            library.nope  # noqa: B018
    assert not hasattr(page.zeros(1), "einsum")


def test_the_names_of_torch_are_those_of_the_installed_one():
    made: dict[str, set] = {}
    exec(torch_names.text(), made)
    assert (made["TENSOR"], made["TORCH"]) == (TENSOR, TORCH), "run python docs/torch_names.py"


def test_page_tensors_have_no_method_that_torch_lacks():
    methods = {name for name in page.methods.METHODS if not name.startswith("_")}
    assert methods <= TENSOR
