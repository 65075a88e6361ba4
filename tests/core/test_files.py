"Tables for the terminal that are also Markdown, and texts that do not steer it."

import pytest

from instruct_goose.core.files import printable, text_table


def test_text_table_lines_up_and_escapes():
    table = text_table(["", "a|b"], [["x", 1.23456], ["two\u2028lines", None], [True, 12]])
    assert table.splitlines() == [
        "|           | a\\|b  |",
        "|-----------|-------|",
        "| x         | 1.235 |",
        "| two lines | –     |",
        "| True      | 12    |",
    ]
    assert text_table(["a"], [["b"]]) == "| a   |\n|-----|\n| b   |"


# --- what is shown ---


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("a\rb", r"a\rb"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egood", r"\u202egood"),
        ("\ud800", r"\ud800"),
        ("\x07\x00\x7f", r"\x07\x00\x7f"),
        ("a\n\tb", "a\n\tb"),
        ("漢字 🙂 é", "漢字 🙂 é"),
    ],
)
def test_escape_sequences_are_shown_not_sent(text, shown):
    assert printable(text) == shown and printable(shown) == shown


def test_a_table_shows_what_would_steer_a_terminal():
    assert r"\x1b[2Jgone" in text_table(["text"], [["\x1b[2Jgone"]])
