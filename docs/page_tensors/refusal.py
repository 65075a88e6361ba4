"""What this library does not do as torch does it, it refuses by name."""

from typing import NoReturn


class NotOnThisPage(NotImplementedError):
    "torch can do this; the tensors of this page cannot."


class NoSuchAttribute(NotOnThisPage, AttributeError):
    "The same for an attribute, so that `hasattr` says False."


def refuse(what: str) -> NoReturn:
    "Say by name what is missing, and where it can be had."
    raise NotOnThisPage(f"this page has part of torch, and not `{what}`: open the notebook")


def refuse_keywords(function: str, keywords: dict) -> None:
    "Refuse keywords that torch's function may know and this one does not."
    for name in keywords:
        refuse(f"{function}({name}=…)")
