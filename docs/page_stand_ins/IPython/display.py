"""Text with headings and tables, shown below a cell."""

from page_runner import SHOWN


class Markdown:
    def __init__(self, data: str):
        self.data = data


def display(*things: object) -> None:
    "Show things below the cell."
    SHOWN.extend(things)
