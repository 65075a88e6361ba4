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
from instruct_goose.doctor.report import COLOURS, QUANTITIES, groups_of, read_run

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
