"A run in a directory: what it leaves, how it goes on, and what it refuses."

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_trainer import HELD_OUT, PROMPTS, no_clock, reward, same, tiny, trainer, weights

from instruct_goose import train_in
from instruct_goose.models.adapters import with_lora
from instruct_goose.models.agent import Agent
from instruct_goose.models.loading import load_model
from instruct_goose.recipes.own_model import SFTConfig
from instruct_goose.recipes.training import answer, fingerprint_of_prompts, first_of
from instruct_goose.runs.directory import settings_of
from instruct_goose.training.callbacks import Callback


def log_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return no_clock(rows)


def test_a_run_leaves_its_log_policy_card_samples_and_last_its_summary(tmp_path):
    summary = train_in(trainer(steps=2), tmp_path / "run", PROMPTS, reward, progress=False)
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
    assert len(log_of(tmp_path / "run")) == summary["iterations"] == 2
    samples = (tmp_path / "run/samples.md").read_text()
    assert samples.startswith("# Training prompts, before and after")
    card = (tmp_path / "run/policy/README.md").read_text()
    assert "PPO, 2 iterations" in card and "library_name: transformers" in card


def test_a_run_that_grows_has_the_numbers_of_one_that_was_never_stopped(tmp_path):
    train_in(trainer(steps=2), tmp_path / "grown", PROMPTS, reward, progress=False)
    grown = trainer(steps=4)
    train_in(grown, tmp_path / "grown", PROMPTS, reward, resume=True, progress=False)
    whole = trainer(steps=4)
    train_in(whole, tmp_path / "whole", PROMPTS, reward, progress=False)
    assert log_of(tmp_path / "grown") == log_of(tmp_path / "whole")
    assert same(weights(grown), weights(whole))


def test_a_finished_run_is_loaded_and_not_repeated(tmp_path):
    trained = trainer(steps=2)
    summary = train_in(trained, tmp_path, PROMPTS, reward, progress=False)

    def asked_again(texts):
        raise AssertionError("the reward was asked")

    fresh = trainer(steps=2)
    again = train_in(fresh, tmp_path, PROMPTS, asked_again, resume=True, progress=False)
    assert again == summary
    assert same(weights(fresh), weights(trained))


def test_other_prompts_other_settings_and_a_full_directory_are_refused(tmp_path):
    train_in(trainer(steps=1), tmp_path, PROMPTS, reward, progress=False)
    with pytest.raises(ValueError, match="SHA-256 of the prompts"):
        train_in(trainer(steps=2), tmp_path, PROMPTS[:4], reward, resume=True, progress=False)
    with pytest.raises(ValueError, match="beta"):
        train_in(trainer(steps=2, beta=0.7), tmp_path, PROMPTS, reward, resume=True, progress=False)
    with pytest.raises(FileExistsError, match="already holds"):
        train_in(trainer(steps=1), tmp_path, PROMPTS, reward, progress=False)


def test_other_held_out_prompts_are_refused_where_the_run_evaluates_on_them(tmp_path):
    def go_on(settings, held_out, steps, resume):
        t = trainer(steps=steps, **settings)
        train_in(t, run, PROMPTS, reward, held_out=held_out, resume=resume, progress=False)

    evaluating = {"eval_every": 1, "keep_best": True}
    run = tmp_path / "evaluates"
    go_on(evaluating, HELD_OUT, steps=1, resume=False)
    with pytest.raises(ValueError, match="SHA-256 of the held-out prompts"):
        go_on(evaluating, HELD_OUT[:2], steps=2, resume=True)
    go_on(evaluating, HELD_OUT, steps=2, resume=True)

    run = tmp_path / "shows samples of them only"
    go_on({}, HELD_OUT, steps=1, resume=False)
    go_on({}, HELD_OUT[:2], steps=2, resume=True)


def test_the_same_prompts_get_the_same_answers_and_no_reward_is_asked_unless_given():
    t = trainer()
    unscored = answer(t, HELD_OUT)
    scored = answer(t, HELD_OUT, reward)
    assert unscored.prompts == scored.prompts and unscored.responses == scored.responses
    assert len(unscored.responses) == len(HELD_OUT)
    assert unscored.mean_score is None
    wholes = [f"{prompt} {text}" for prompt, text in zip(*scored[:2], strict=True)]
    expected = torch.tensor(reward(wholes), dtype=torch.float32).mean().item()
    assert scored.mean_score == pytest.approx(expected, abs=1e-6)


def test_a_stream_is_not_read_for_samples_or_a_fingerprint():
    stream = iter(PROMPTS)
    assert first_of(stream, 3) is None
    assert fingerprint_of_prompts(stream) == "a stream"
    assert list(stream) == PROMPTS


def test_a_fingerprint_depends_on_every_row_and_their_order():
    prints = {
        fingerprint_of_prompts(rows) for rows in (PROMPTS, PROMPTS[::-1], PROMPTS[:-1], ["other"])
    }
    assert len(prints) == 4
    assert fingerprint_of_prompts(tuple(PROMPTS)) == fingerprint_of_prompts(PROMPTS)


def test_a_fingerprint_of_tensors_depends_on_each_number():
    ids = torch.arange(4000).view(1000, 4)
    other = ids.clone()
    other[500, 2] = 0
    prints = [fingerprint_of_prompts({"query_ids": x, "query_mask": x > 1}) for x in (ids, other)]
    assert prints[0] != prints[1]
    assert prints[0] == fingerprint_of_prompts({"query_ids": ids, "query_mask": ids > 1})


def test_a_reward_is_tried_before_the_first_rollout_and_draws_no_number(tmp_path):
    "As the command line does. Nothing is written; a reward that draws numbers changes no run."

    def fails(texts):
        raise KeyError("the user's own")

    with pytest.raises(
        ValueError, match="^reward_fn, asked about 2 sample answers before the run.*the user's own"
    ):
        train_in(trainer(steps=1), tmp_path / "run", PROMPTS, fails, progress=False)
    assert not (tmp_path / "run").exists()

    def draws(texts):
        return [np.random.rand() + torch.rand(()).item() for _ in texts]

    logs = []
    for name, trial in (("tried", True), ("not", False)):
        np.random.seed(0)
        torch.manual_seed(0)
        train_in(trainer(steps=1), tmp_path / name, PROMPTS, draws, progress=False, trial=trial)
        logs.append(no_clock(map(json.loads, (tmp_path / name / "metrics.jsonl").open())))
    assert logs[0] == logs[1]


def test_a_summary_is_a_dictionary_that_is_shown_in_a_line(tmp_path):
    summary = train_in(trainer(steps=2), tmp_path, PROMPTS, reward, progress=False)
    assert len(repr(summary)) < 200 and "\n" not in repr(summary)
    assert "2 iterations" in repr(summary) and "reward_mean" in repr(summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_table_of_samples_shows_what_the_user_asked_last(tmp_path):
    "Not the beginning of the system prompt, which all rows share."
    trained = trainer(steps=1, max_new_tokens=2)
    trained.tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    try:
        rows = [
            {
                "prompt": [
                    {"role": "system", "content": "w8 w8"},
                    {"role": "user", "content": "w7"},
                    {"role": "assistant", "content": "w6"},
                    {"role": "user", "content": f"w{i}"},
                ]
            }
            for i in range(4)
        ]
        train_in(trained, tmp_path, rows, reward, progress=False)
    finally:
        trained.tokenizer.chat_template = None
    lines = (tmp_path / "samples.md").read_text().splitlines()[4:]
    assert [line.split("|")[1].strip() for line in lines] == ["w0", "w1", "w2", "w3"]


def test_what_a_second_call_says_is_said_in_python(tmp_path):
    train_in(trainer(steps=1), tmp_path, PROMPTS, reward, progress=False)
    with pytest.raises(FileExistsError, match="already holds a run: resume=True goes on with it"):
        train_in(trainer(steps=1), tmp_path, PROMPTS, reward, progress=False)


class EndsIn(Callback):
    def __init__(self, how, at=2):
        self.how = how
        self.at = at

    def on_iteration(self, trainer, experience, metrics):
        if trainer.iteration == self.at:
            if self.how == "stop":
                return "seen enough"
            raise KeyboardInterrupt
        return None


def test_an_interrupted_call_is_told_how_to_go_on_in_python(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train_in(
            trainer(steps=3, callbacks=[EndsIn("stop here")]),
            tmp_path,
            PROMPTS,
            reward,
            progress=False,
        )
    said = capsys.readouterr().err
    assert "resume=True" in said and "--resume" not in said


def test_a_run_that_a_callback_ended_can_be_made_longer(tmp_path):
    "Though it was stopped before its first checkpoint by count; it is the run that was that long."
    ended = train_in(
        trainer(steps=3, callbacks=[EndsIn("stop")]), tmp_path, PROMPTS, reward, progress=False
    )
    assert ended["stopped"] and len(log_of(tmp_path)) == 2
    train_in(trainer(steps=4), tmp_path, PROMPTS, reward, resume=True, progress=False)
    train_in(trainer(steps=4), tmp_path / "whole", PROMPTS, reward, progress=False)
    assert log_of(tmp_path) == log_of(tmp_path / "whole")


def test_a_grown_run_with_a_falling_rate_is_interrupted_before_its_first_whole_step(
    tmp_path, capsys
):
    "policy/ holds the last whole policy, and Ctrl-C stays what it is."
    settings = dict(lr_schedule="linear")
    train_in(trainer(steps=2, **settings), tmp_path, PROMPTS, reward, save_every=1, progress=False)
    (tmp_path / "summary.json").unlink()
    grown = trainer(steps=4, callbacks=[Stops()], **settings)
    with pytest.raises(KeyboardInterrupt):
        train_in(grown, tmp_path, PROMPTS, reward, save_every=1, resume=True, progress=False)
    assert (tmp_path / "policy/model.safetensors").is_file()
    said = capsys.readouterr().out
    assert "the first 2 iterations had that of a run of 2, the rest have that of a run of 4" in said


class Stops(Callback):
    def on_annotate(self, trainer, annotations):
        raise KeyboardInterrupt


def test_threads_may_be_named_later():
    "None at the start, one when it goes on: a run has the threads that its checkpoint knows."
    then = settings_of(SFTConfig(model=".", data=Path("rows.jsonl")))
    now = settings_of(SFTConfig(model=".", data=Path("rows.jsonl"), threads=1))
    assert then == now


def test_a_finished_run_that_is_being_made_longer_is_not_finished(tmp_path):
    "policy/ of the interrupted run is another one than the old summary's: asking for that is refused."
    train_in(trainer(steps=1), tmp_path, PROMPTS, reward, progress=False)
    grown = trainer(steps=4, callbacks=[EndsIn("interrupt", at=3)])
    with pytest.raises(KeyboardInterrupt):
        train_in(grown, tmp_path, PROMPTS, reward, resume=True, save_every=1, progress=False)
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(ValueError, match="steps was 4 and is 1"):
        train_in(trainer(steps=1), tmp_path, PROMPTS, reward, resume=True, progress=False)
    train_in(trainer(steps=4), tmp_path, PROMPTS, reward, resume=True, progress=False)
    train_in(trainer(steps=4), tmp_path / "whole", PROMPTS, reward, progress=False)
    assert log_of(tmp_path) == log_of(tmp_path / "whole")


def stored(path, dtype):
    tiny(dtype=dtype).save_pretrained(path)
    return load_model(path)


def test_a_finished_run_of_a_model_that_was_stored_in_bfloat16_is_loaded(tmp_path):
    "It learns in float32 and is stored in bfloat16; what comes back is what policy/ holds."
    trained = trainer(model=stored(tmp_path / "model", torch.bfloat16), steps=1)
    train_in(trained, tmp_path / "run", PROMPTS, reward, progress=False)
    fresh = trainer(model=load_model(tmp_path / "model"), steps=1)
    train_in(fresh, tmp_path / "run", PROMPTS, reward, resume=True, progress=False)
    for loaded, x in zip(
        fresh.agent.model.parameters(), trained.agent.model.parameters(), strict=True
    ):
        assert loaded.dtype == torch.float32 and torch.equal(loaded, x.bfloat16().float())


@pytest.mark.parametrize("kind", ["stored in bfloat16", "never on disk"])
def test_a_finished_run_of_adapters_is_loaded_to_the_bit(tmp_path, kind):
    pytest.importorskip("peft")

    def with_adapters():
        model = tiny(dtype=torch.float32)
        if kind == "stored in bfloat16":
            model = stored(tmp_path / "model", torch.bfloat16)
        torch.manual_seed(0)
        return trainer(model=with_lora(model, rank=2), steps=1)

    trained = with_adapters()
    train_in(trained, tmp_path / "run", PROMPTS, reward, progress=False)
    fresh = with_adapters()
    train_in(fresh, tmp_path / "run", PROMPTS, reward, resume=True, progress=False)
    assert same(weights(fresh), weights(trained))


def test_of_a_value_model_with_adapters_the_policy_alone_is_loaded_with_a_word(tmp_path):
    "The value model was saved with its adapters merged, which cannot be told apart again."
    pytest.importorskip("peft")

    def with_two_models():
        torch.manual_seed(0)
        model = with_lora(tiny(dtype=torch.float32), rank=2)
        return trainer(model=Agent(model, value_model="copy"), steps=1)

    trained = with_two_models()
    train_in(trained, tmp_path, PROMPTS, reward, progress=False)
    fresh = with_two_models()
    with pytest.warns(UserWarning, match="its values are not"):
        train_in(fresh, tmp_path, PROMPTS, reward, resume=True, progress=False)
    policies = [t.agent.model.parameters() for t in (fresh, trained)]
    assert same(*policies)
