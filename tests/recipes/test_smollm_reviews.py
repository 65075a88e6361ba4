"Judges on a trunk that is computed once: beside the model's own hidden states; raters dealt; the recipe on the stand-in."
import json
import re
from itertools import combinations

import pytest
import torch
from device.pretend import PretendGPU
from transformers import LlamaConfig, LlamaForCausalLM

from instruct_goose.cli.main import main
from instruct_goose.models.loading import stand_in
from instruct_goose.recipes import smollm_reviews
from instruct_goose.recipes.ratings import Review, load_reviews, rehearse
from instruct_goose.recipes.smollm_reviews import Judge, lower_states, only, train_on_states, two_halves, upper_scores

TEXTS = ["a fine film", "the plot", "a slow and silly film the plot is dull", "fine"]
WORDS = sorted({w for t in TEXTS for w in t.split()} | {"is", "it", "good"})
ASK = " is it good"


def model(layers=4):
    tokenizer = stand_in(WORDS)[1]
    torch.manual_seed(3)
    shape = LlamaConfig(vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=3, num_key_value_heads=1,
                        initializer_range=.2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    return LlamaForCausalLM(shape).eval(), tokenizer


def judge_with_a_head(frozen=2, trained=1):
    lm, tokenizer = model()
    judge = Judge(lm, tokenizer, frozen, trained, ASK)
    with torch.no_grad(): judge.learns[-1].weight.copy_(torch.linspace(-1, 1, 24)[None])
    return lm, judge


def test_both_halves_of_the_forward_beside_the_models_own_states():
    lm, judge = judge_with_a_head()
    states = lower_states(judge.reward_model.model.base_model, judge.rows(TEXTS), 2, batch_tokens=14)
    found, w = upper_scores(judge.reward_model, states, 2), torch.linspace(-1, 1, 24)
    for text, x, stored in zip(TEXTS, states, found, strict=True):       # row by row, without padding, in the untouched model
        ids = torch.tensor([[lm.config.vocab_size and judge.reward_model.tokenizer.convert_tokens_to_ids(t) for t in (text + ASK).split()]])
        hidden = lm.model(ids, output_hidden_states=True).hidden_states   # hidden[k]: what goes into layer k
        torch.testing.assert_close(x.float(), hidden[2][0], rtol=8e-3, atol=8e-3)   # bfloat16 has 8 bits
        last = hidden[3][0, -1]
        whole = (last / (last.square().mean() + lm.config.rms_norm_eps).sqrt()) @ w    # the norm's weights are 1
        assert judge.score([text])[0] == pytest.approx(whole.item(), rel=1e-4, abs=1e-5)
        assert stored.item() == pytest.approx(whole.item(), abs=.08)
    assert found.std() > .3


def test_scores_are_of_the_text_before_the_padding():
    _, judge = judge_with_a_head()
    states = [torch.randn(n, 24) for n in (3, 9, 5)]
    together = upper_scores(judge.reward_model, states, 2)
    for x, score in zip(states, together, strict=True): torch.testing.assert_close(upper_scores(judge.reward_model, [x], 2)[0], score, rtol=1e-4, atol=1e-5)


def test_layers_are_put_back_whatever_happens():
    lm, _ = model()
    layers, norm = lm.model.layers, lm.model.norm
    with pytest.raises(KeyError), only(lm.model, 1, 3) as body:
        assert len(body.layers) == 2 and body.layers[0] is layers[1] and body.norm is not norm
        raise KeyError
    assert lm.model.layers is layers and lm.model.norm is norm
    with only(lm.model, 1, 4) as body: assert body.norm is norm


@pytest.mark.parametrize("frozen, trained", [(0, 1), (2, 0), (3, 2)])
def test_layers_that_are_not_there(frozen, trained):
    with pytest.raises(ValueError, match="no more than the model's 4"): Judge(*model(), frozen, trained, ASK)


def rated(n=60):
    rows = []
    for i in range(n):
        good = i % 3 - 1
        rows.append(Review(str(i), ["a dull film", "the plot", "a fine film"][i % 3] + " and" * (i % 4), (2 * good, 2 * good + 1, 2 * good - 1, i % 2)))
    return rows


def test_only_the_upper_layers_learn_and_come_back_from_a_file(tmp_path):
    lm, tokenizer = model()
    judge, reviews = Judge(lm, tokenizer, 2, 1, ASK), rated()
    before = {k: x.clone() for k, x in judge.reward_model.state_dict().items()}
    states = lower_states(judge.reward_model.model.base_model, judge.rows([r.text for r in reviews]), 2)
    log = train_on_states(judge, reviews, states, epochs=8., lr=3e-3, batch_size=20, progress=False)
    assert len(log) == 24 and log[0]["loss"] == pytest.approx(.6931, abs=1e-3) and log[-1]["loss"] < .6
    moved = {k for k, x in judge.reward_model.state_dict().items() if not torch.equal(x, before[k])}
    assert {re.sub(r".*layers\.(\d).*", r"\1", k) for k in moved if "layers." in k} == {"2"} and len([k for k in moved if "layers.2" in k]) == 9
    assert not any("embed" in k for k in moved) and not any(p.requires_grad for p in judge.reward_model.parameters())
    judge.normalise(TEXTS)
    scores = torch.tensor(judge.score(TEXTS))
    assert scores.mean().abs() < 1e-5 and scores.std(correction=0) == pytest.approx(1, abs=1e-5)
    judge.save(tmp_path / "judges" / "one.safetensors")
    again = Judge(lm, tokenizer, 2, 1, ASK)
    again.load(tmp_path / "judges" / "one.safetensors")
    assert again.score(TEXTS) == judge.score(TEXTS)
    with pytest.raises(RuntimeError, match="layers|Missing|Unexpected|key"): Judge(lm, tokenizer, 2, 2, ASK).load(tmp_path / "judges" / "one.safetensors")


def test_raters_are_dealt_and_nobody_is_in_both_halves():
    reviews = [Review("a", "x", (1, 2, 3, 4, -4)), Review("b", "y", (0, -1))]
    first, second = two_halves(reviews, 5)
    for r, a, b in zip(reviews, first, second, strict=True):
        assert sorted(a.ratings + b.ratings) == sorted(r.ratings) and (len(a.ratings), len(b.ratings)) == (len(r.ratings) // 2, (len(r.ratings) + 1) // 2)
    assert two_halves(reviews, 5) == (first, second) and any(two_halves(reviews, s)[0] != first for s in range(6, 12))
    with pytest.raises(ValueError, match="'c' has 1 rater"): two_halves([Review("c", "z", (1,))])


def test_the_table_of_judges_by_counting(tmp_path):
    rehearse(tmp_path, 60)
    reviews = load_reviews(tmp_path)
    data = smollm_reviews.RatedData(reviews[:40], two_halves(reviews[:40]), reviews[40:])

    class Fixed(Judge):
        def __init__(self, sign): self.sign = sign
        def score(self, texts): return [float(self.sign * len(t)) for t in texts]

    table = smollm_reviews.rank_judges({"proxy": Fixed(1), "other_half": Fixed(-1)}, data)
    for margin, name in ((0, "pair_accuracy"), (1, "pair_accuracy_margin_1")):
        asked = [(a, b) for a, b in combinations(data.held_out, 2) if a.mean != b.mean and abs(a.mean - b.mean) >= margin]
        share = sum(.5 if len(a.text) == len(b.text) else (len(a.text) > len(b.text)) == (a.mean > b.mean) for a, b in asked) / len(asked)
        assert table["proxy"][name] == pytest.approx(share) and table["other_half"][name] == pytest.approx(1 - share)
        assert table["both"][name] == .5 < table["ridge"][name]


def test_the_run_and_its_judges_again(tmp_path, capsys):
    flags = ["recipe", "smollm-reviews", "--stand-in", "--no-progress", "--steps", "2", "--seed", "3"]
    main([*flags, "--output-dir", str(tmp_path / "one")])
    one = json.loads((tmp_path / "one/summary.json").read_text())
    assert set(one["judges"]["seconds"]) == {"lower_layers", "proxy", "other_half"}
    main([*flags, "--output-dir", str(tmp_path / "two"), "--judges", str(tmp_path / "one/judges"), "--beta", "0"])
    two = json.loads((tmp_path / "two/summary.json").read_text())
    assert two["judges"] == one["judges"] and two["before"] == one["before"] and two["config"]["beta"] == 0
    assert not (tmp_path / "two/judges").exists()
    log = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert all(m["reward_mean"] == pytest.approx(m["reward_mean/proxy"]) for m in log)   # the others have no weight
    assert all(m["reward_mean/vader"] is not None and m["reward_mean/other_half"] is not None for m in log)
    capsys.readouterr()


def test_what_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--data DIR"): main(["recipe", "smollm-reviews"])
    with pytest.raises(SystemExit, match="reads no judges"): main(["recipe", "smollm-answers", "--judges", str(tmp_path), "--stand-in"])
    with pytest.raises(ValueError, match="prompt_words"): smollm_reviews.settings(stand_in=True, prompt_words=(3, 2))
    with pytest.raises((SystemExit, OSError), match="none/proxy"):
        main(["recipe", "smollm-reviews", "--stand-in", "--no-progress", "--judges", str(tmp_path / "none"), "--output-dir", str(tmp_path / "run")])


def test_judges_on_a_gpu_that_is_not_there(tmp_path):
    with PretendGPU():
        config = smollm_reviews.settings(stand_in=True, progress=False, steps=1, judge_epochs=1., eval_samples=8, device="cuda", output_dir=tmp_path / "run")
        assert smollm_reviews.run(config)["judges"]["pairs"]["proxy"]["pair_accuracy"] > 0
