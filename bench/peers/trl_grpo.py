"""TRL's GRPOTrainer on the models, prompts and reward of bench.cases.grpo, one iteration, that is one generation, at a time."""

import torch
from datasets import Dataset
from transformers import TrainerCallback

from bench.cases.grpo import BETA, EPOCHS, GROUP, LR, POLICY, PROMPTS
from bench.form import Job
from bench.peers.turns import Turns
from bench.tiny import RESPONSE, even_share, gpt2, movement, prompts, tokenizer


def trainer(iterations: int = 300) -> Job:
    from trl import GRPOConfig, GRPOTrainer

    rows = PROMPTS * GROUP
    args = GRPOConfig(
        output_dir="runs/bench-trl-grpo",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        num_iterations=EPOCHS,
        steps_per_generation=1,
        max_completion_length=RESPONSE,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=BETA,
        loss_type="grpo",
        scale_rewards="group",
        use_bias_correction_kl=False,
        learning_rate=LR,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        max_steps=iterations * EPOCHS,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )
    words = tokenizer(beyond=True)
    data = Dataset.from_dict({"prompt": words.batch_decode(prompts(PROMPTS * 64, 0))})
    model = gpt2(POLICY)
    model.save_pretrained(args.output_dir)
    model.config._name_or_path = args.output_dir  # where it looks for the reference model
    t = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [even_share(c) for c in completions],
        args=args,
        train_dataset=data,
        processing_class=words,
    )
    turns = Turns(t.train)
    seen = {"loss": []}

    class Gate(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step % EPOCHS == 0:
                turns.gate()

        def on_log(self, args, state, control, logs=None, **_):
            seen["logs"] = [*seen.get("logs", []), logs]

    t.add_callback(Gate())
    generate, score = t._generate, t._generate_and_score_completions

    def generated(*args, **kwargs):
        turns.mark("begun")
        out = generate(*args, **kwargs)
        turns.mark("written")
        return out

    def scored(*args, **kwargs):
        seen["batch"] = score(*args, **kwargs)
        turns.mark("judged")
        return seen["batch"]

    t._generate, t._generate_and_score_completions = generated, scored

    def run():
        turns.step()
        m = turns.marks
        return {
            "rollout": m["written"] - m["start"],
            "score": m["judged"] - m["written"],
            "update": m["end"] - m["judged"],
        }

    def check(_):
        run()
        batch = seen["batch"]
        logs = [x for x in seen["logs"] if "loss" in x]
        given = {
            "queries": batch["prompt_ids"].tolist(),
            "responses": batch["completion_ids"].tolist(),
        }
        first = logs[0]
        kl = [x["kl"] for x in logs]
        policy_loss = sum(x["loss"] - BETA * k for x, k in zip(logs, kl)) / len(logs)
        return {
            "given": given,
            "numbers": {
                "score": first["reward"],
                "policy_loss": policy_loss,
                "movement": movement(model, POLICY),
            },
        }

    torch.set_num_threads(1)
    return Job(run, check, ("trl", "accelerate"))
