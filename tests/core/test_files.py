"Tables for the terminal that are also Markdown."

from instruct_goose.core.files import text_table


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
