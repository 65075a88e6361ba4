"""Operations on page tensors give torch's numbers, types, shapes and gradients, or are refused by name.

The samples are torch's own (OpInfo). "Refused" is `NotOnThisPage`; anything else that differs, an
error too, is a defect.
"""

import opinfo
import page_tensors as page
import pytest

DECLARED = opinfo.declared()
REFUSED = {  # operations of torch's list of which a page has no sample at all
    "div (floor_rounding)",
    "div (trunc_rounding)",
    "linspace (tensor_overload)",
    "logspace (tensor_overload)",
    "movedim",
    "nn.functional.pad (circular)",
    "nn.functional.pad (reflect)",
    "nn.functional.pad (replicate)",
    "nn.functional.pad (replicate_negative)",
    "norm (nuc)",
    "round (decimals_0)",
    "round (decimals_3)",
    "round (decimals_neg_3)",
    "squeeze (multiple)",
    "to",
}


def spread(every: list, most: int) -> list:
    "At most so many of the samples, at equal distances: torch puts those of one kind together."
    step = max(1, -(-len(every) // most))
    return every[::step]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[opinfo.Outcome]]:
    "Of up to a hundred samples of every operation and type."
    found = {}
    for one in DECLARED:
        for dtype in opinfo.DTYPES:
            found[one.name, dtype] = [
                opinfo.compare(one.info.op, one.function, arguments, keywords)
                for arguments, keywords in spread(list(opinfo.samples(one, dtype)), 100)
            ]
    return found


def test_no_sample_gives_another_result(outcomes):
    wrong = [
        f"{name} of {dtype}: {outcome.detail[:300]}"
        for (name, dtype), several in outcomes.items()
        for outcome in several
        if outcome.word == "differs"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_declared_operation_agrees_on_some_sample_but_for_the_listed_ones(outcomes):
    agrees = {
        name for (name, _), several in outcomes.items() if "equal" in {x.word for x in several}
    }
    asked = {name for (name, _), several in outcomes.items() if several}
    assert asked - agrees == REFUSED


def test_a_wrong_derivative_would_be_found(monkeypatch):
    entry = page.elementwise.UNARY["exp"]
    wrong = entry._replace(derivative=lambda g, x, out: g)
    monkeypatch.setitem(page.elementwise.UNARY, "exp", wrong)
    (exp,) = [one for one in DECLARED if one.name == "exp"]
    words = {
        opinfo.compare(exp.info.op, exp.function, arguments, keywords).word
        for arguments, keywords in opinfo.samples(exp, "float64")
    }
    assert "differs" in words
