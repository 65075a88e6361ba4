"""The page of a run: made from files that were written by hand, opened in a browser with the
network off, fed with bad ones.
"""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from instruct_goose.cli.main import main
from instruct_goose.doctor.diagnosis import diagnose
from instruct_goose.doctor.report import (
    COLOURS,
    QUANTITIES,
    Line,
    RunRecord,
    band,
    bands,
    checked_response,
    column_scales,
    curves,
    figures,
    findings_html,
    groups_of,
    html_table,
    last_iterations,
    lines_of,
    make_page,
    page_record,
    picture,
    points,
    read_run,
    read_tokens,
    run_facts,
    samples_in,
    samples_table,
    save_page,
    setting_differences,
    settings_that_differ,
    shade,
    stage_figures,
)

EVIL = '</script><script>document.title = "owned"</script><img src=x onerror=alert(1)> & "quotes"'
chromium = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)


def make_run(path: Path, steps=5, tokens=True, **config) -> Path:
    "A run directory as another program may have written it."
    path.mkdir(parents=True)
    rows = [
        {
            "iteration": i,
            "reward_mean": i / 10 + config.get("seed", 0),
            "kl_to_reference": 0.5 * i,
            "entropy": 1.5,
            "response_length": 7.0,
            "clip_fraction": 0.1,
            "explained_variance": None,
        }
        for i in range(steps)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    (path / "config.json").write_text(
        json.dumps({"algorithm": "ppo", "seed": 0, "lr": 0.001} | config), "utf-8"
    )

    def response(i):
        return {
            "prompt": EVIL,
            "score": -1.5,
            "tokens": ["good", EVIL, " a"],
            "clipped": [False, True, False],
            **{name: [0.1 * i, -1.0, 2.0] for name in QUANTITIES},
        }

    if tokens:
        (path / "tokens.jsonl").write_text(
            "".join(
                json.dumps({"iteration": i, "responses": [response(i)]}) + "\n"
                for i in range(steps)
            ),
            "utf-8",
        )
    (path / "samples.md").write_text(
        f"# The same\n\n| prompt | SFT model | policy |\n|---|---|---|\n| a | {EVIL} | b \\| c |\n\n"
        "# Figures\n\n| x |\n|---|\n| no |\n",
        "utf-8",
    )
    (path / "summary.json").write_text(
        json.dumps(
            {
                "cpu_seconds": 12.3,
                "stopped": None,
                "before": {"human_score": 0.1},
                "baselines": {"best_of_8": {"human_score": 1.0}},
                "after": {"human_score": 2.25, "distinct_2": 0.5},
                "versions": {"torch": "2"},
            }
        ),
        "utf-8",
    )
    return path


def page_of(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


def test_the_page_says_what_the_files_say(tmp_path, capsys):
    run = make_run(tmp_path / "mine")
    main(["report", str(run)])
    assert str(run / "report.html") in capsys.readouterr().out
    page = page_of(run / "report.html")
    assert (
        page.h1.text == "mine"
        and "seed 0" in page.select_one(".facts").text
        and "12 CPU-seconds" in page.select_one(".facts").text
    )
    figures = [
        [c.text for c in row.find_all(["th", "td"])]
        for row in page.select_one("#part-figures").parent.select("tr")
    ]
    assert figures == [
        ["", "human score", "distinct 2"],
        ["before", "0.100", "–"],
        ["best of 8", "1.000", "–"],
        ["after", "2.250", "0.500"],
    ]
    assert len(page.select(".curves svg")) == 5  # values were not learnt
    samples = page.select_one("#part-samples").parent
    assert [c.text for c in samples.select("td")] == [
        "a",
        EVIL,
        "b | c",
    ] and "no" not in samples.text.split()
    assert [a["href"] for a in page.select("nav a")] == [f"#{h['id']}" for h in page.select("h2")]
    assert not page.select("img, link, script[src]") and "://" not in page.text.replace(
        "http://www.w3.org", ""
    )


def in_browser(run, tmp_path, at) -> BeautifulSoup:
    "The page as a browser has it, with the network off."
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    done = subprocess.run(
        [
            chromium,
            *flags,
            f"--user-data-dir={tmp_path}/profile",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            (run / "report.html").as_uri() + at,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "rror" not in "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return BeautifulSoup(done.stdout, "html.parser")


@pytest.mark.skipif(chromium is None, reason="no Chromium on this machine")
def test_the_microscope_in_a_browser(tmp_path):
    run = make_run(tmp_path / "mine")
    main(["report", str(run)])
    page = in_browser(run, tmp_path, "#iteration=3&quantity=drift")
    assert page.title.text == "mine" and page.select_one("output").text == "3"
    boxes = page.select(".rows .token")
    assert [b.b.text for b in boxes] == ["good", EVIL, " a"] and [b.small.text for b in boxes] == [
        "+0.30",
        "−1.00",
        "+2.00",
    ]
    assert ["clipped" in b["class"] for b in boxes] == [False, True, False]
    shades = [
        float(b["style"].rpartition(",")[2].strip(" );")) for b in boxes
    ]  # of .15, −.5 and 1, three quarters
    assert shades == pytest.approx([0.75 * 0.15, 0.75 * 0.5, 0.75], abs=0.01)
    assert "±2.0" in page.select_one(".scale").text and EVIL in page.select_one(".response p").text


def test_tokens_that_the_policy_did_not_write_are_given(tmp_path):
    """In the record, in its scale (9 is a tool's), in its shades and, where there is a browser, on
    the page.
    """
    run = make_run(tmp_path / "mine", tokens=False)
    column = {
        "log_ratio": [0.5, 9.0, -1.0],
        "old_logprobs": [-1.0, -7.0, -3.0],
        "log_ratio_to_reference": [0.5, 3.0, -2.0],
        "ref_logprobs": [-1.5, -10.0, -1.0],
    }
    response = {
        "prompt": "",
        "score": 0.0,
        "tokens": ["a", "tool", "b"],
        "clipped": [False] * 3,
        "from_environment": [False, True, False],
    } | column
    (run / "tokens.jsonl").write_text(json.dumps({"iteration": 0, "responses": [response]}) + "\n")
    main(["report", str(run)])
    page = page_of(run / "report.html")
    record = json.loads(page.select_one("#record").string)
    assert record["scales"] == {
        "log_ratio": 1.0,
        "old_logprobs": 3.0,
        "log_ratio_to_reference": 2.0,
        "ref_logprobs": 1.5,
    }
    [seen] = record["iterations"][0]["responses"]
    assert seen["from_environment"] == [False, True, False] and seen["numbers"]["log_ratio"] == [
        [0.5, 0.5],
        [9.0, 0.0],
        [-1.0, -1.0],
    ]
    assert [x for x, _ in seen["numbers"]["ref_logprobs"]] == [-1.5, -10.0, -1.0]
    if chromium is None:
        return
    page = in_browser(run, tmp_path, "#iteration=0&quantity=ref_logprobs")
    boxes = page.select(".rows .token")
    assert [o["value"] for o in page.select("option")] == [
        *record["scales"]
    ] and "from the environment" in page.select_one("#microscope .note").text
    assert [b.small.text for b in boxes] == ["−1.50", "environment", "−1.00"] and [
        "environment" in b["class"] for b in boxes
    ] == [False, True, False]


def test_runs_compared(tmp_path, capsys):
    runs = [
        make_run(tmp_path / n, **c)
        for n, c in (
            ("a", {"seed": 0}),
            ("b", {"seed": 4}),
            ("c", {"seed": 0, "lr": 0.01}),
            ("d", {"beta": 1}),
        )
    ]
    groups = groups_of([read_run(r) for r in runs])
    assert [[r.name for r in g] for g in groups.values()] == [["a", "b"], ["c"], ["d"]]
    assert list(groups)[0].endswith("2 seeds") and "lr 0.01" in list(groups)[1]
    out = tmp_path / "both.html"
    main(["compare", *map(str, runs), "--out", str(out)])
    page = page_of(out)
    ends = [
        [c.text for c in row.select("td")]
        for row in page.select_one("#part-last-iteration").parent.select("tr")
    ][1:]
    assert [e[:4] for e in ends] == [
        ["a", "5", "0.400", "2.000"],
        ["b", "5", "4.400", "2.000"],
        ["c", "5", "0.400", "2.000"],
        ["d", "5", "0.400", "2.000"],
    ]
    assert "lr" in page.select_one("#part-settings-that-differ").parent.text


@pytest.mark.parametrize(
    "spoil, said",
    [
        ({"metrics.jsonl": None}, "metrics.jsonl is missing"),
        ({"metrics.jsonl": ""}, "empty"),
        ({"summary.json": "["}, "summary"),
        ({"config.json": "[]"}, "config"),
        ({"tokens.jsonl": "{}\n{}\n"}, "tokens.jsonl, line 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, spoil, said):
    run = make_run(tmp_path / "mine")
    for name, text in spoil.items():
        (run / name).unlink() if text is None else (run / name).write_text(text)
    with pytest.raises(SystemExit, match=said):
        main(["report", str(run)])
    assert not (run / "report.html").exists()


def test_odd_numbers_do_not_stop_the_page(tmp_path):
    run = make_run(tmp_path / "mine")
    rows = [
        {"iteration": i, "reward_mean": x, "kl_to_reference": "many", "entropy": None}
        for i, x in enumerate([1, math.nan, 1e300, True])
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    main(["report", str(run)])
    assert "cannot read this log" in page_of(run / "report.html").text


STAGES = {
    "sft": ({}, {"nats_after": 1.25}, ["Loss"]),
    "dpo": (
        {"accuracy": 0.5, "margin": 0.1, "chosen_logprob": -9.0, "rejected_logprob": -9.0},
        {"pair_accuracy": 1.0},
        ["Loss", "Accuracy on the pairs of a batch", "Margin, nats", "Log-probability, nats"],
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_supervised_stage_has_its_curves_its_figures_and_an_honest_doctor(tmp_path, stage):
    more, figures, titles = STAGES[stage]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": i, "loss": 1 / (i + 1), "lr": 1e-5} | more) + "\n" for i in range(9)
        ),
        "utf-8",
    )
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0}), "utf-8")
    (tmp_path / "summary.json").write_text(
        json.dumps({"held_out_rows": 4, "held_out_seen": 0, **figures}), "utf-8"
    )
    main(["report", str(tmp_path)])
    page = page_of(tmp_path / "report.html")
    assert (
        [f"{title}" in page.text for title in titles]
        == [True] * len(titles)
        == [True] * len(page.select(".curves svg"))
    )
    assert (
        "9 updates" in page.select_one(".facts").text
        and ("accuracy on pairs" in page.text) == (stage == "dpo")
        and "held-out rows" in page.text
    )
    found = page.select_one("#part-findings").parent.text
    assert (
        ("few pairs" in found and "of 4 pairs" in found)
        if stage == "dpo"
        else "rules for a supervised stage find nothing" in found
    )


@pytest.mark.parametrize(
    "metrics, config, name",
    [
        ({"chosen_logprob": lambda i: -10.0 - i}, {}, "chosen falls"),
        ({}, {"pair_accuracy": 0.99, "held_out_rows": 12}, "few pairs"),
        ({}, {"held_out_rows": 12, "held_out_seen": 3}, "learnt rows held out"),
    ],
)
def test_the_doctor_has_a_few_rules_for_supervised_stages(metrics, config, name):
    def log(metrics):
        return [
            {"step": i, "loss": 1.0, "lr": 1e-3} | {k: f(i) for k, f in metrics.items()}
            for i in range(12)
        ]

    assert [f.name for f in diagnose(log(metrics), config)] == [name]
    assert not diagnose(
        log({"chosen_logprob": lambda i: -10.0 + i % 2}),
        {"pair_accuracy": 0.99, "held_out_rows": 1000, "held_out_seen": 0},
    )


def test_a_small_number_keeps_its_digits_and_a_panel_the_colour_of_its_run(tmp_path):
    runs = [
        make_run(tmp_path / "a", lr=1e-5),
        make_run(tmp_path / "b", lr=2e-5, note="$x_{$ and $\\frac$"),
    ]
    rows = [{"reward_mean": 1.0}] * 3
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    main(["compare", *map(str, runs), "--out", str(tmp_path / "c.html")])
    page = page_of(tmp_path / "c.html")
    assert {"1e−05", "2e−05"} <= {c.text for c in page.select("td")} and "0.000" not in page.text
    score, kl = page.select(".curves svg")[:2]
    assert COLOURS[0] in str(score) and COLOURS[1] in str(score)
    assert COLOURS[1] in str(kl) and COLOURS[0] not in str(kl)


def test_nan_in_the_tokens_is_null_on_the_page(tmp_path):
    run = make_run(tmp_path / "mine")
    text = (run / "tokens.jsonl").read_text("utf-8")
    (run / "tokens.jsonl").write_text(
        text.replace("-1.0, 2.0", "NaN, Infinity").replace('"score": ', '"score": NaN, "old": '),
        "utf-8",
    )
    main(["report", str(run)])

    def no_constant(x):
        raise AssertionError(x)

    record = json.loads(
        page_of(run / "report.html").select_one("#record").string, parse_constant=no_constant
    )
    assert record["iterations"][1]["responses"][0]["numbers"]["log_ratio"] == [
        [0.1, 0.25],
        [None, 0.0],
        [None, 0.0],
    ]


def test_other_line_separators_end_no_row_of_the_samples(tmp_path):
    run = make_run(tmp_path / "mine")
    (run / "samples.md").write_text(
        "| prompt | policy |\n|---|---|\n| a\u2028b | c\x0bd |\n| a row | too | long |\n", "utf-8"
    )
    main(["report", str(run)])
    assert len(page_of(run / "report.html").select_one("#part-samples").parent.select("td")) == 4


def test_nothing_but_a_page_is_overwritten_and_no_run_is_its_own_seed(tmp_path):
    run = make_run(tmp_path / "a/run")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="and no page"):
        main(["report", str(run), "--out", str(run / "metrics.jsonl")])
    assert (run / "metrics.jsonl").read_bytes() == before
    with pytest.raises(SystemExit, match="1 different"):
        main(["compare", str(run), str(run)])
    other = make_run(tmp_path / "b/run")
    for x in (run, other):
        (x / "config.json").unlink()
    assert (
        len(groups_of([read_run(run), read_run(other)])) == 2
    )  # of one name, and without settings


# ---------------------------------------------------------------- the parts of a page
def cells_of(html):
    "The texts of a table, row by row."
    rows = BeautifulSoup(html, "html.parser").select("tr")
    return [[cell.text for cell in row.select("th, td")] for row in rows]


def recorded(tokens=("a", "b"), **columns):
    return {"tokens": list(tokens), "clipped": [False] * len(tokens)} | columns


def record_of(name="run", metrics=({"iteration": 0},), config=None, summary=None):
    return RunRecord(name, list(metrics), [], config or {}, summary or {}, {}, "")


def token_lines(*iterations):
    return [json.dumps({"iteration": i, "responses": [recorded()]}) for i in iterations]


def test_recorded_tokens_are_read_in_order(tmp_path):
    "Of two lines for one iteration the later counts; empty lines and a broken last one do not."
    path = tmp_path / "tokens.jsonl"
    assert read_tokens(path) == {}
    later = json.dumps({"iteration": 2, "responses": [recorded(["c"])]})
    path.write_text("\n".join([*token_lines(2, 0), "", later, '{"iteration": 3, "resp']))
    read = read_tokens(path)
    assert list(read) == [0, 2]
    assert read[2] == [recorded(["c"])] and read[0] == [recorded()]


@pytest.mark.parametrize(
    "line",
    [
        '{"iteration": 1, "resp',
        '{"iteration": 1.0, "responses": []}',
        '{"iteration": true, "responses": []}',
        '{"responses": []}',
        '{"iteration": 1, "responses": [{"tokens": ["a"]}]}',
        '{"iteration": 1, "responses": [{"tokens": ["a"], "clipped": []}]}',
    ],
)
def test_a_damaged_line_of_tokens_is_named(tmp_path, line):
    path = tmp_path / "tokens.jsonl"
    path.write_text("\n".join([*token_lines(0), line, *token_lines(2)]))
    with pytest.raises(ValueError, match="line 2 is no record"):
        read_tokens(path)
    path.write_text("\n".join([*token_lines(0), line]))
    assert list(read_tokens(path)) == [0]
    path.write_text("\n".join([*token_lines(0), line, ""]))
    with pytest.raises(ValueError, match="line 2 is no record"):
        read_tokens(path)


@pytest.mark.parametrize("name", ["log_ratio", "returns", "from_environment"])
def test_columns_are_checked(name):
    numbers = [math.nan, -math.inf]
    assert checked_response(recorded(**{name: numbers}))[name] == [None, None]
    assert checked_response(recorded(**{name: [None, 0.5]}))[name] == [None, 0.5]
    with pytest.raises(ValueError, match="different lengths"):
        checked_response(recorded(**{name: [0.5]}))


def test_columns_of_an_older_version_get_their_names_of_today():
    old = {"tokens": ["a"], "held": [True], "moved": [0.5]}
    assert checked_response(old) == {"tokens": ["a"], "clipped": [True], "log_ratio": [0.5]}


def test_the_deepest_colour_is_that_of_the_largest_number():
    "Of all responses; tokens of the environment and missing numbers do not count."
    responses = [
        recorded(log_ratio=[0.5, -2.0], kl=[None, None]),
        recorded(log_ratio=[1.0, 9.0], from_environment=[False, True]),
        recorded(),
    ]
    assert column_scales(responses) == {"log_ratio": 2.0, "kl": 0.0}


@pytest.mark.parametrize(
    "x, scale, expected",
    [
        (1.0, 2.0, 0.5),
        (-1.0, 3.0, -0.33),
        (2.0, 1.0, 1.0),
        (-2.0, 1.0, -1.0),
        (0.5, 0.5, 1.0),
        (None, 1.0, 0.0),
        (1.0, 0.0, 0.0),
    ],
)
def test_a_shade_is_between_minus_1_and_1(x, scale, expected):
    assert shade(x, scale) == expected


def test_the_notes_of_a_run_say_what_is_missing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "entropy": 1.0}\n{"iteration": 1, "e')
    run = read_run(tmp_path)
    assert run.notes == [
        "line 2 is cut short and left out: the run is still writing?",
        "There is no config.json.",
        "There is no summary.json.",
    ]
    assert (run.name, run.config, run.tokens, run.samples) == (tmp_path.name, {}, {}, "")
    whole = read_run(make_run(tmp_path / "whole"))
    assert whole.notes == [] and whole.samples.startswith("# The same")


@pytest.mark.parametrize(
    "number, is_drawn",
    [(0, True), (-1e100, True), (1e101, False), (math.nan, False), (True, False), ("1", False)]
    + [(None, False)],
)
def test_which_numbers_can_be_drawn(number, is_drawn):
    drawn = points([{}, {"x": number}], "x")
    assert drawn == ({1: float(number)} if is_drawn else {})


def test_a_line_keeps_the_colour_of_its_place():
    panel = {"x": "first", "y": "second", "z": "third"}
    assert lines_of([{"y": 1.0}, {}, {"y": 3, "z": 0.0}], panel) == [
        Line("second", [0, 2], [1.0, 3.0], colour=1),
        Line("third", [2], [0.0], colour=2),
    ]


def test_the_line_of_several_seeds():
    "The median of three, at the iterations that all have, and the lowest and highest."
    runs = [
        [{"x": 1.0}, {"x": 5.0}, {"x": 1.0}],
        [{"x": 2.0}, {"x": 4.0}, {}],
        [{"x": 9.0}, {"x": 3.0}, {"x": 1.0}],
    ]
    assert band("l", runs, "x", 3) == Line("l", [0, 1], [2.0, 4.0], [1.0, 3.0], [9.0, 5.0], 3)
    assert band("l", runs[:1], "x", 3) == Line("l", [0, 1, 2], [1.0, 5.0, 1.0], colour=3)
    assert band("l", runs, "y") is None
    of_runs = {"a": [record_of(metrics=[{}])], "b": [record_of(metrics=[{"x": 1.0}])]}
    assert bands(of_runs, "x") == [Line("b", [0], [1.0], colour=1)]


def test_a_picture():
    lines = [
        Line("$x$ & y", [0, 1], [1.0, 2.0], [0.0, 1.0], [2.0, 3.0]),
        Line("z", [0, 1], [1.0, 1.0], colour=len(COLOURS) + 1),
    ]
    svg = picture("A title", lines)
    assert svg.startswith('<svg role="img" ') and svg.count("<svg") == 1
    assert 'width="302.4pt" height="180pt"' in svg  # 4.2 by 2.5 inches
    assert svg == picture("A title", lines)  # no date, and no random names
    assert "<metadata>" not in svg and "#262626" not in svg and "fill: #ffffff" not in svg
    drawn = BeautifulSoup(svg, "html.parser")
    texts = {text.text: text["style"] for text in drawn.select("text")}
    assert {"A title", "$x$ & y", "z"} <= texts.keys()
    assert "text-anchor: start" in texts["A title"] or "text-anchor" not in texts["A title"]
    assert all("fill: currentColor" in style for style in texts.values())
    assert "font-size: 9px" in texts["0.0"]
    styles = [path.get("style", "") for path in drawn.select("path, use")]
    for colour in COLOURS[:2]:
        thick = f"stroke: {colour}; stroke-width: 1.8"
        assert sum(thick in style for style in styles) == 2  # its line, and that of the legend
    assert f"fill: {COLOURS[0]}; fill-opacity: 0.18" in svg
    assert f"fill: {COLOURS[1]}; fill-opacity" not in svg
    assert "stroke: #b0b0b0; stroke-opacity: 0.2" in svg  # the grid
    frame = [style for style in styles if "stroke-linecap: square" in style]
    assert sum("stroke: currentColor" in style for style in frame) == 2  # of four sides
    assert "stroke: #cccccc" not in svg  # that of a legend
    ids = [tag["id"] for tag in drawn.select("[id]")]
    assert ids and all(f"#{name}" in svg for name in ids)


@pytest.mark.parametrize("number, colour, has_legend", [(1, 0, False), (1, 1, True), (2, 0, True)])
def test_a_legend_says_which_line_is_which(number, colour, has_legend):
    svg = picture("t", [Line("the label", [0, 1], [1.0, 2.0], colour=colour)] * number)
    assert (">the label<" in svg) == has_legend


def test_only_panels_with_lines_are_drawn():
    drawn = curves({"One": [Line("l", [0], [1.0])], "None": []})
    assert drawn.startswith('<div class="curves"><figure><svg') and drawn.endswith("</div>")
    assert drawn.count("<figure>") == 1 and ">One<" in drawn


# ---------------------------------------------------------------- several runs
def test_the_labels_of_groups():
    "Settings that differ; the name where they are long; a number where two are the same."
    long = "x" * 50
    records = [
        record_of("a", config={"lr": 1, "seed": 0}),
        record_of("b", config={"lr": 1, "seed": 1}),
        record_of("c", config={"lr": 2}),
        record_of("d", config={"lr": long}),  # of 53 letters
        record_of("e", config={"lr": long + "y" * 7}),  # of 60
        record_of("f"),
        record_of("f"),
    ]
    assert {label: [run.name for run in runs] for label, runs in groups_of(records).items()} == {
        "lr 1, 2 seeds": ["a", "b"],
        "lr 2": ["c"],
        f"lr {long}": ["d"],
        "e": ["e"],
        "f": ["f"],
        "f, 6": ["f"],
    }
    assert list(groups_of([record_of("g", config={"lr": 1})])) == ["g"]


def test_a_label_of_59_letters_is_short_enough():
    records = [record_of("a", config={"lr": "x" * 56}), record_of("b", config={"lr": "x" * 57})]
    assert list(groups_of(records)) == ["lr " + "x" * 56, "b"]


def test_the_settings_in_which_runs_differ():
    records = [
        record_of("a", config={"lr": 1, "beta": 0.5, "seed": 0, "steps": 3}),
        record_of("b", config={"lr": 2, "beta": 0.5, "seed": 1, "clip": 0.25}),
    ]
    assert setting_differences(records) == ["lr", "steps", "clip"]
    assert cells_of(settings_that_differ(records)) == [
        ["setting", "a", "b"],
        ["lr", "1", "2"],
        ["steps", "3", "–"],
        ["clip", "–", "0.250"],
    ]
    assert settings_that_differ(records[:1]) == '<p class="none">None but the seeds.</p>'


def test_how_runs_ended():
    metrics = [{"reward_mean": 0.0}, {"reward_mean": 0.5, "entropy": 2}]
    assert cells_of(last_iterations([record_of("a", metrics)])) == [
        ["run", "iterations", "score", "KL", "entropy"],
        ["a", "2", "0.500", "–", "2"],
    ]


# ---------------------------------------------------------------- tables
@pytest.mark.parametrize(
    "value, text",
    [
        (0.25, "0.250"),
        (0.01, "0.010"),
        (0.0099, "0.0099"),
        (-0.00123456, "−0.00123"),
        (0.0, "0.000"),
        (-1.5, "−1.500"),
        (1.0, "1.000"),
        (7, "7"),
        (-7, "-7"),
        ("<b>", "<b>"),
        (True, "True"),
    ],
)
def test_the_text_of_a_number(value, text):
    assert cells_of(html_table(["h"], [[value]])) == [["h"], [text]]
    assert html_table(["h"], []) == ""
    assert html_table(["h"], [[1]]) == (
        '<div class="wide"><table><tr><th>h</th></tr><tr><td>1</td></tr></table></div>'
    )


def test_figures_of_a_summary_without_baselines():
    summary = {"before": {"a_b": 0.5}, "after": {"a_b": 1.0, "c": 2}, "baselines": None}
    assert cells_of(figures(summary)) == [
        ["", "a b", "c"],
        ["before", "0.500", "–"],
        ["after", "1.000", "2"],
    ]
    assert figures({}) == ""


def test_figures_of_a_supervised_stage():
    summary = {"nats_before": 2.0, "nats_after": 1, "held_out_rows": 8, "pair_accuracy": None}
    assert cells_of(stage_figures(summary)) == [
        ["", "value", "held-out rows"],
        ["nats per token before", "2.000", "8"],
        ["nats per token after", "1", "8"],
    ]
    assert cells_of(stage_figures({"pair_accuracy": 1.0}))[1] == ["accuracy on pairs", "1.000", "0"]
    assert stage_figures({}) == ""


SAMPLES = """# Title

| x |
|---|
| no |

| a | b |
|---|---|
| 1 | 2 \\| 3 |
| short |
| 4 | 5 | 6 |

# Figures

| y |
|---|
| no |
"""


def test_samples_are_the_last_table_of_the_first_section():
    assert samples_in(SAMPLES).startswith("| a | b |") and samples_in(SAMPLES).endswith("6 |")
    assert cells_of(samples_table(SAMPLES)) == [
        ["a", "b"],
        ["1", "2 | 3"],
        ["short", ""],
        ["4", "5"],
    ]
    assert samples_in("") == samples_in("# Title\n\ntext") == samples_table("") == ""


# ---------------------------------------------------------------- findings, tokens, the page
def test_findings_are_boxes():
    falling = [{"iteration": i, "entropy": 1.0 * 0.5**i} for i in range(8)]
    boxes = BeautifulSoup(findings_html(falling, {}, {}), "html.parser").select(".finding")
    found = diagnose(falling)
    assert len(boxes) == len(found) == 1
    assert boxes[0]["class"] == ["finding", found[0].severity]
    assert [p.text for p in boxes[0].select("p")] == [
        f"{found[0].name}: {found[0].what}",
        f"seen: {found[0].evidence}",
        f"cure: {found[0].cure}",
    ]
    assert "no proof" in findings_html([{"entropy": 1.0}], {}, {})


@pytest.mark.parametrize(
    "recorded_iterations, most, kept",
    [
        (3, 3, [0, 1, 2]),
        (4, 3, [0, 2, 3]),
        (7, 3, [0, 3, 6]),
        (8, 3, [0, 3, 6, 7]),
        (1, 3, [0]),
    ],
)
def test_some_iterations_are_shown_and_the_last_one(recorded_iterations, most, kept):
    tokens = {10 * i: [recorded(log_ratio=[0.5, -1.0])] for i in range(recorded_iterations)}
    page = page_record(tokens, most)
    assert [shown["iteration"] for shown in page["iterations"]] == [10 * i for i in kept]
    assert page["scales"] == {"log_ratio": 1.0}
    assert page["words"] == {"log_ratio": QUANTITIES["log_ratio"]}
    assert page["iterations"][0]["responses"] == [
        recorded() | {"numbers": {"log_ratio": [[0.5, 0.5], [-1.0, -1.0]]}}
    ]


def test_a_response_shows_the_columns_that_it_has():
    tokens = {0: [recorded(kl=[1.0, 2.0], score=0.5, prompt="p", end=1), recorded()]}
    first, second = page_record(tokens)["iterations"][0]["responses"]
    assert first == recorded(score=0.5, prompt="p") | {"numbers": {"kl": [[1.0, 0.5], [2.0, 1.0]]}}
    assert second == recorded() | {"numbers": {}}


def test_sections_in_order_with_links():
    page = BeautifulSoup(
        make_page("A <h>", "facts & more", {"Part One": "<p>1</p>", "Empty": "", "Two": "2"}),
        "html.parser",
    )
    assert page.title.text == page.h1.text == "A <h>"
    assert page.select_one(".facts").text == "facts & more"
    assert [(a["href"], a.text) for a in page.select("nav a")] == [
        ("#part-part-one", "Part One"),
        ("#part-two", "Two"),
    ]
    assert [h2["id"] for h2 in page.select("h2")] == ["part-part-one", "part-two"]
    assert page.select_one("#record").string.strip() == "null"
    text = make_page("t", "", {}, {"a": ["</script>", math.nan]})
    assert '{"a": ["\\u003c/script>", null]}' in text


@pytest.mark.parametrize(
    "content, is_page",
    [
        (None, True),
        ("<!DOCTYPE html>old", True),
        ("<!doctype", True),
        ("<!doc", False),
        ("", False),
    ],
)
def test_a_page_is_written_over_a_page_alone(tmp_path, capsys, content, is_page):
    path = tmp_path / "page.html"
    if content is not None:
        path.write_text(content)
    if is_page:
        assert save_page(path, "é" * 1000) == path
        assert path.read_text("utf-8") == "é" * 1000
        assert capsys.readouterr().out == f"{path}: 2 kB, to be opened in any browser\n"
    else:
        with pytest.raises(FileExistsError):
            save_page(path, "new")
        assert path.read_text() == content


@pytest.mark.parametrize(
    "config, summary, metrics, facts",
    [
        ({}, {}, {"iteration": 0}, ["1 iterations"]),
        ({"algorithm": None, "seed": 0}, {}, {"loss": 1.0, "step": 0}, ["seed 0", "1 updates"]),
        (
            {"algorithm": "ppo"},
            {"cpu_seconds": 12.6, "stopped": "too far"},
            {"iteration": 0},
            ["ppo", "1 iterations", "13 CPU-seconds", "stopped early: too far"],
        ),
        ({}, {"cpu_seconds": None, "stopped": None}, {"iteration": 0}, ["1 iterations"]),
    ],
)
def test_the_facts_of_a_run(config, summary, metrics, facts):
    assert run_facts(record_of("r", [metrics], config, summary)) == facts


def test_the_sections_of_a_bare_run_and_of_a_whole_one(tmp_path):
    "Settings are sorted, notes are told, and the page goes where it is asked for."
    run = make_run(tmp_path / "whole", beta=0.5)
    main(["report", str(run), "--out", str(tmp_path / "page.html")])
    page = page_of(tmp_path / "page.html")
    assert [h2.text for h2 in page.select("h2")] == [
        "Figures",
        "Curves",
        "Microscope",
        "Samples",
        "Findings",
        "Settings",
    ]
    assert page.select_one(".facts").text == "ppo · seed 0 · 5 iterations · 12 CPU-seconds"
    settings = page.select_one("#part-settings").parent
    assert settings.summary.text == "all settings"
    assert cells_of(str(settings)) == [
        ["setting", "value"],
        ["algorithm", "ppo"],
        ["beta", "0.500"],
        ["lr", "0.001"],
        ["seed", "0"],
    ]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"iteration": 0, "reward_mean": 1.0}\n')
    main(["report", str(bare)])
    page = page_of(bare / "report.html")
    assert [h2.text for h2 in page.select("h2")] == ["Notes", "Curves", "Findings"]
    assert [p.text for p in page.select("#part-notes ~ p")] == [
        "There is no config.json.",
        "There is no summary.json.",
    ]
    assert page.select_one("#record").string.strip() == "null"
