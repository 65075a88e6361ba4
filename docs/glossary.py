"""The glossary: a page of its own, and the first time a page uses a term a hover text that links to it."""

import html
import re

TERMS = {  # term: what it is, the lesson that teaches it, other words for it (matched too)
    "action": (
        "What the policy chooses: for a language model the next token, or the whole response.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "advantage": (
        "How much better an action was than expected: what followed it, less what the values had promised.",
        "learn/advantages",
        ("advantages",),
    ),
    "agreement": (
        "How often two raters say the same. Cohen's kappa takes off what chance alone would give: κ = (p_o − p_e)/(1 − p_e).",
        "learn/reward_model",
        ("Cohen's kappa", "Krippendorff's α"),
    ),
    "bandit": (
        "One action, one reward, and nothing follows: a whole response, seen as a single action. With a context, the prompt: a contextual bandit.",
        "learn/from_a_reward_to_ppo",
        ("contextual bandit",),
    ),
    "baseline": (
        "A number that is subtracted from the reward. If it does not depend on the action, the gradient's mean is unchanged and its variance falls.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "best-of-n": (
        "Sample n answers and keep the one with the highest score: a baseline that needs no training.",
        "learn/evaluation",
        ("best of n",),
    ),
    "Bradley–Terry": (
        "A model of comparisons: the chance that one answer is preferred is the sigmoid of the difference of two scores.",
        "learn/reward_model",
        (),
    ),
    "calibration": (
        "Whether a reward model's probabilities are right: of the pairs to which it gives .7, seven in ten should be preferred.",
        "learn/reward_model",
        ("calibrated",),
    ),
    "CISPO": (
        "The ratio, capped and without a gradient, weights Â log π: no token loses its gradient to a clip.",
        "learn/policy_loss",
        (),
    ),
    "clip": (
        "Once a token's importance ratio has left 1 ± ε in the direction of its advantage, it gets no gradient.",
        "learn/policy_loss",
        ("clipping", "PPO clip", "ratio clip"),
    ),
    "clip fraction": (
        "The share of tokens whose gradient the clip has cut.",
        "learn/policy_loss",
        (),
    ),
    "credit assignment": (
        "Which of many actions earned the reward that came at the end.",
        "learn/advantages",
        (),
    ),
    "critic": (
        "What estimates how much reward is still to come, for the advantages; for language models mostly a value head.",
        "learn/value_loss",
        (),
    ),
    "DAPO": (
        "GRPO with a wider clip above, a mean over tokens, no groups of equal scores, a length penalty and no KL.",
        "learn/group",
        (),
    ),
    "DPO": (
        "Direct preference optimisation: the KL-penalised objective solved in closed form, so that pairs train the policy without a reward model.",
        "learn/preference",
        (),
    ),
    "Dr. GRPO": (
        "GRPO without two divisions, by the group's standard deviation and by the length of the response: each favours some.",
        "learn/group",
        (),
    ),
    "entropy": (
        "How spread out a distribution is, in nats: 0 for one certain token, log V for a uniform one.",
        "learn/logprobs",
        (),
    ),
    "entropy bonus": (
        "A coefficient times the entropy, added to the objective, so that the policy keeps trying other tokens.",
        "learn/ppo",
        (),
    ),
    "entropy collapse": (
        "The policy's entropy falls to nearly 0 before it has found good responses.",
        "guides/questions",
        (),
    ),
    "episode": (
        "From the first action to the end: for a language model one response.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "explained variance": (
        "The share of the returns' variance that the values explain: 1 is perfect, 0 no better than the mean.",
        "learn/value_loss",
        (),
    ),
    "GAE": (
        "Generalised advantage estimation: TD errors added up with weights (γλ)ˡ, from the values alone (λ = 0) to the rewards alone (λ = 1).",
        "learn/advantages",
        (),
    ),
    "GRPO": (
        "Group relative policy optimisation: the mean score of a group of responses to the same prompt takes the place of a critic.",
        "learn/group",
        (),
    ),
    "GSPO": (
        "GRPO with one ratio, and so one clip, for each response: the geometric mean of its tokens' ratios.",
        "learn/policy_loss",
        (),
    ),
    "importance ratio": (
        "π(a) / π_old(a): how much likelier a token is now than when it was sampled. It corrects for samples that an older policy wrote.",
        "learn/policy_loss",
        ("probability ratio",),
    ),
    "KL penalty": (
        "β times the KL between policy and reference, subtracted from the reward. It keeps the policy near the reference, where the reward model is reliable.",
        "learn/kl",
        (),
    ),
    "KL divergence": (
        "How different two distributions are, in nats: the mean log-ratio under the first. Never negative; 0 where they are equal.",
        "learn/kl",
        (),
    ),
    "KV cache": (
        "The keys and values of the tokens read so far, stored so that a new token costs one step and not the whole text.",
        "learn/rollout",
        (),
    ),
    "log-ratio": ("log π − log π_ref (or π_old) of a token that was sampled.", "learn/kl", ()),
    "logits": ("The numbers that a softmax turns into probabilities.", "learn/logprobs", ()),
    "LoRA": (
        "Low-rank adaptation: the model is frozen, and a product of two thin matrices is trained beside each of its matrices.",
        "guides/lora",
        ("adapters",),
    ),
    "Markov decision process": (
        "States, actions, rewards, and a next state that depends on the last state and action alone. In a text that is the text with one token more.",
        "learn/from_a_reward_to_ppo",
        ("MDP",),
    ),
    "nats": (
        "The unit of entropy and KL with natural logarithms; a nat is 1.44 bits.",
        "learn/kl",
        (),
    ),
    "off-policy": ("Trained on what another policy wrote.", "learn/policy_loss", ()),
    "on-policy": ("Trained on what the policy itself has just written.", "learn/policy_loss", ()),
    "on-policy distillation": (
        "The student samples, and at each of its tokens the loss is its KL to the teacher's distribution.",
        "learn/distillation",
        (),
    ),
    "over-optimisation": (
        "The proxy reward goes on rising with the KL while the true reward falls: reward hacking, as a curve.",
        "learn/evaluation",
        ("over-optimised",),
    ),
    "pass@k": (
        "The share of prompts of which at least one of k sampled answers is right; pass@1 is the mean.",
        "learn/evaluation",
        ("pass@1",),
    ),
    "policy gradient": (
        "∇E[r] = E[r·∇log π]: cross-entropy on the policy's own samples, weighted by their reward.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "PPO": (
        "Proximal policy optimisation: several steps on each batch of samples, with a clip on the importance ratio, and advantages from a critic.",
        "learn/ppo",
        (),
    ),
    "preference pair": (
        "Two answers to one prompt, and which of them a person liked better.",
        "learn/reward_model",
        ("preference pairs",),
    ),
    "process reward": (
        "A reward for each step of a solution, not for its outcome alone; a model that gives it is a PRM.",
        "learn/reward_model",
        ("process rewards",),
    ),
    "reference": (
        "The frozen model that the KL is measured from, usually the one that fine-tuning left.",
        "learn/agent",
        (),
    ),
    "REINFORCE": (
        "The plain policy gradient: each sample's ∇log π times its reward, mostly less a baseline; one step on a batch, no critic, no clip.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "rejection sampling": (
        "Sample n answers, keep the best, and train on them by SFT. Also a way to draw exactly from one distribution with samples of another.",
        "learn/sft",
        ("RAFT", "expert iteration"),
    ),
    "return": (
        "What follows a token: its rewards, added up and discounted.",
        "learn/advantages",
        (),
    ),
    "reward hacking": (
        "The score rises and the text gets worse: the policy exploits errors of the reward model.",
        "learn/quickstart",
        (),
    ),
    "reward model": (
        "A model that gives a text a score, learnt from what people preferred.",
        "learn/reward_model",
        (),
    ),
    "RLHF": (
        "Reinforcement learning from human feedback: SFT, a reward model from preferences, then PPO or a relative.",
        "learn/quickstart",
        (),
    ),
    "RLOO": (
        "REINFORCE leave-one-out: each response is compared with the mean of the other responses to its prompt.",
        "learn/group",
        (),
    ),
    "rollout": (
        "Sampling responses from the policy, with everything that training needs to know of them.",
        "learn/rollout",
        ("rollouts",),
    ),
    "sandbox": (
        "A process with limits, or a container without a network, in which code that a model wrote is run.",
        "learn/verifiable_rewards",
        (),
    ),
    "SFT": (
        "Supervised fine-tuning: cross-entropy on good examples, before any reward.",
        "learn/sft",
        (),
    ),
    "staleness": (
        "How many updates lie between the policy that wrote a sample and the one that learns from it.",
        "learn/exact_world",
        ("stale samples",),
    ),
    "state": (
        "What a policy sees when it chooses: for a language model the prompt and the tokens so far.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "surrogate": (
        "The objective that is maximised in place of the expected reward, because it can be computed from old samples.",
        "learn/policy_loss",
        (),
    ),
    "temperature": (
        "What logits are divided by before the softmax. The policy that is trained must be the policy that sampled.",
        "learn/logprobs",
        (),
    ),
    "TD error": (
        "δ = r + γ·V(next) − V(now): the error of the value estimate over one step.",
        "learn/advantages",
        ("TD errors",),
    ),
    "token mean": (
        "The mean over all real tokens of a batch, so that long responses count more; a sequence mean counts each response once.",
        "learn/masks",
        (),
    ),
    "TRPO": (
        "Trust region policy optimisation: the surrogate is maximised under a bound on the KL. PPO's clip replaces the bound.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "trust region": (
        "How far one batch may move the policy: a bound on the KL in TRPO, the clip in PPO.",
        "learn/from_a_reward_to_ppo",
        (),
    ),
    "truncated importance sampling": (
        "A constant weight for each token, π_old/μ cut at the top, where a sampler μ is not quite the policy.",
        "learn/policy_loss",
        ("TIS",),
    ),
    "value head": (
        "A linear layer on the model's hidden states that says how much reward it expects from here on; the critic.",
        "learn/agent",
        ("value function",),
    ),
    "verifiable reward": (
        "A reward from a check by code, such as a right number or tests that pass, and not from a learnt model.",
        "learn/verifiable_rewards",
        ("verifiable rewards",),
    ),
    "verifier": (
        "The code behind a verifiable reward. It can be wrong both ways: pass a wrong answer, and fail a right one.",
        "learn/verifiable_rewards",
        (),
    ),
    "whitening": (
        "Shifting and scaling to mean 0 and variance 1, over real tokens only.",
        "learn/masks",
        ("whitened",),
    ),
}
ALIASES = {  # what else is typed into the search -> the page that teaches it
    "Q function": "learn/advantages",
    "Q value": "learn/advantages",
    "A2C": "learn/group",
    "trajectory": "learn/from_a_reward_to_ppo",
    "RLAIF": "guides/questions",
    "constitutional AI": "guides/questions",
    "DeepSeek-R1": "guides/questions",
    "cold start": "guides/questions",
    "size of the reward model": "learn/reward_model",
    "how to choose beta": "guides/first_settings",
    "which beta": "guides/first_settings",
    "alignment tax": "guides/questions",
    "forgetting": "guides/questions",
    "catastrophic forgetting": "guides/questions",
    "base or instruct": "guides/questions",
    "LLM as a judge reward": "guides/questions",
    "rubric": "guides/questions",
    "my model never solves it": "guides/questions",
    "prompts in another language": "learn/verifiable_rewards",
    "grader timeout": "learn/verifiable_rewards",
    "Elo": "learn/reward_model",
    "forward KL": "learn/kl",
    "mode-seeking": "learn/kl",
    "mass-covering": "learn/kl",
    "false positives": "learn/verifiable_rewards",
    "verifier errors": "learn/verifiable_rewards",
    "weight averaging": "guides/questions",
    "model averaging": "guides/questions",
    "what does a run cost": "guides/cost",
    "GPU hours": "guides/cost",
    "cost of distillation": "learn/distillation",
    "why is my reward not going up": "learn/reading_the_log",
    "reward does not increase": "learn/reading_the_log",
    "lora learning rate": "guides/first_settings",
    "which learning rate": "guides/first_settings",
    "calibration": "learn/reward_model",
    "sycophancy": "learn/reward_model",
    "reward model from the Hub": "learn/reward_model",
    "abstain": "learn/verifiable_rewards",
    "I don't know": "learn/verifiable_rewards",
    "refusals": "learn/verifiable_rewards",
    "held-out rows": "guides/your_data",
    "thumbs up": "guides/kto",
    "which stage first": "guides/your_stages",
    "pairs from another model": "guides/dpo",
    "value bootstrapping truncation": "learn/advantages",
    "how many GPUs": "guides/cost",
    "how much memory": "guides/cost",
    "agents": "learn/agents",
    "tool use": "learn/agents",
    "tool calls": "learn/agents",
    "tool calling": "learn/agents",
    "function calling": "learn/agents",
    "reward function": "learn/your_own",
    "multi-turn": "learn/agents",
    "AutoModelForCausalLMWithValueHead": "guides/from_value_head",
    "PPOTrainer": "guides/from_value_head",
    "DPPO": "learn/exact_world",
    "MaxRL": "learn/exact_world",
    "RLVR": "learn/verifiable_rewards",
    "reinforcement learning with verifiable rewards": "learn/verifiable_rewards",
    "verifiable rewards": "learn/verifiable_rewards",
    "PRM": "learn/reward_model",
    "process reward model": "learn/reward_model",
    "custom reward function": "learn/your_own",
    "Goodhart": "learn/evaluation",
    "Goodhart's law": "learn/evaluation",
    "overoptimization": "learn/evaluation",
    "reward overoptimization": "learn/evaluation",
    "over-optimization": "learn/evaluation",
    "best of n": "learn/evaluation",
    "win rate": "learn/evaluation",
    "reward gaming": "learn/quickstart",
    "specification gaming": "learn/quickstart",
    "overoptimisation": "learn/evaluation",
    "off policy": "learn/policy_loss",
    "on policy": "learn/policy_loss",
    "importance weights": "learn/policy_loss",
    "reward normalization": "guides/reward_shaping",
    "rejection sampling fine-tuning": "learn/sft",
    "RAFT": "learn/sft",
    "kv cache": "learn/rollout",
    "position ids": "learn/agent",
    "left padding": "learn/agent",
    "greedy decoding": "learn/rollout",
    "top-p": "learn/rollout",
    "stop strings": "learn/rollout",
    "importance sampling": "learn/policy_loss",
    "advantage normalization": "learn/masks",
    "advantage normalisation": "learn/masks",
    "padding": "learn/masks",
    "loss mask": "learn/masks",
    "KL coefficient": "learn/kl",
    "KL estimator": "learn/kl",
    "k3": "learn/kl",
    "reverse KL": "learn/kl",
    "adaptive KL": "learn/kl",
    "generalized advantage estimation": "learn/advantages",
    "generalised advantage estimation": "learn/advantages",
    "TD lambda": "learn/advantages",
    "discount factor": "learn/advantages",
    "PPO clip": "learn/policy_loss",
    "clipped surrogate": "learn/policy_loss",
    "clipped objective": "learn/policy_loss",
    "dual clip": "learn/policy_loss",
    "critic": "learn/value_loss",
    "value function": "learn/value_loss",
    "value clipping": "learn/value_loss",
    "actor critic": "learn/agent",
    "group relative policy optimization": "learn/group",
    "leave one out": "learn/group",
    "REINFORCE++": "learn/group",
    "ReMax": "learn/group",
    "Dr. GRPO": "learn/group",
    "direct preference optimization": "learn/preference",
    "IPO": "learn/preference",
    "SimPO": "learn/preference",
    "ORPO": "learn/preference",
    "proximal policy optimization": "learn/ppo",
    "entropy coefficient": "learn/ppo",
    "log prob": "learn/logprobs",
    "softmax temperature": "learn/logprobs",
    "reference model": "learn/agent",
    "preference model": "learn/reward_model",
    "Bradley Terry": "learn/reward_model",
    "generation": "learn/rollout",
    "sampling responses": "learn/rollout",
    "training loop": "learn/trainer",
    "fine-tuning": "learn/sft",
    "instruction tuning": "learn/sft",
    "supervised fine-tuning": "learn/sft",
    "metrics": "guides/logged_metrics",
    "what to monitor": "learn/reading_the_log",
    "debugging": "learn/probes",
    "unit tests for RL": "learn/probes",
    "bugs": "learn/failure_gallery",
    "custom loss": "learn/change_the_loss",
    "own model": "learn/your_own",
    "my data": "guides/your_data",
    "QLoRA": "guides/lora",
    "PEFT": "guides/lora",
    "parameter efficient": "guides/lora",
    "inference engine": "guides/vllm",
    "fully sharded data parallel": "guides/fsdp",
    "asynchronous RL": "guides/asynchronous",
    "off-policy correction": "guides/asynchronous",
    "DDP": "guides/several_processes",
    "multi-GPU": "guides/several_processes",
    "memory": "guides/cost",
    "out of memory": "guides/cost",
    "FLOPs": "guides/cost",
    "roofline": "guides/one_gpu",
    "CUDA graph": "guides/one_gpu",
    "GPU utilisation": "guides/one_gpu",
    "profiler": "guides/one_gpu",
    "checkpoint": "guides/resume",
    "wandb": "guides/trackers",
    "TensorBoard": "guides/trackers",
    "environment": "guides/environments",
    "Gymnasium": "guides/environments",
    "verifiers": "guides/verifiers",
    "math-verify": "guides/verifiers",
    "reasoning-gym": "guides/verifiers",
    "EMA": "reference/training/policies",
    "hyperparameters": "reference/config",
    "learning rate schedule": "reference/training/update",
    "gradient accumulation": "reference/training/update",
    "length penalty": "guides/reward_shaping",
    "reward clipping": "guides/reward_shaping",
    "thumbs": "guides/kto",
    "human feedback": "learn/quickstart",
    "DAPO filter": "guides/dynamic_sampling",
    "knowledge distillation": "learn/distillation",
    "CartPole": "guides/classic_control",
    "TRL": "guides/from_trl",
    "torchtune": "guides/from_torchtune",
}
HOVERED = {
    word: term
    for term, (_, _, others) in TERMS.items()
    for word in (term, *others)
    if term not in ("return", "clip", "state") and word != "agreement"
}  # mostly verbs, and a plain word
WORDS = re.compile(
    r"(?<![\w\-/.`])("
    + "|".join(sorted(map(re.escape, HOVERED), key=len, reverse=True))
    + r")(?![\w\-/`+])"
)
KEEP = re.compile(  # what is no prose: code, formulas, links, roles, html
    r"```.*?```|\$\$.*?\$\$|`[^`\n]*`|\$[^$\n]*\$|!?\[[^\]\n]*\]\([^)\n]*\)|\{py:\w+\}`[^`]*`|<(\w+)[^>]*>.*?</\1>|<[^>\n]+>|^#.*?$|^\|.*?$",
    re.S | re.M,
)


def anchor(term: str) -> str:
    return "term-" + re.sub(r"\W+", "-", term.lower()).strip("-")


def hover(text: str, seen: set[str], glossary: str) -> str:
    "Markdown in which the first use of each term that is not in `seen` has its meaning as hover text and a link to the glossary."

    def mark(m):
        term = HOVERED[m[1]]
        if term in seen:
            return m[1]
        seen.add(term)
        return f'<a class="term" href="{glossary}#{anchor(term)}" title="{html.escape(TERMS[term][0])}">{m[1]}</a>'

    made = []
    end = 0
    for kept in KEEP.finditer(text):
        made += [WORDS.sub(mark, text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*made, WORDS.sub(mark, text[end:])])


def glossary_page(titles: dict[str, str]) -> str:
    "Markdown; `titles` are the pages' by their address."
    words = sorted(TERMS, key=str.lower)
    letters = sorted({w[0].upper() for w in words})
    jumps = " ".join(f'<a href="#letter-{x.lower()}">{x}</a>' for x in letters)
    text = [
        "# Glossary",
        "```{rst-class} subtitle\n```\n\nThe words of the field in a sentence each, and the page that teaches them\n",
        f'<nav class="letters" aria-label="Letters">{jumps}</nav>',
        "The first time a page uses one of these words it is dotted: rest on it to read what it means, click to come here. "
        "The letters of the equations are in [the notation](notation.ipynb).",
    ]
    for term in words:
        meaning, url, others = TERMS[term]
        if letters and term[0].upper() == letters[0]:
            text.append(
                f'<p class="letter" id="letter-{letters.pop(0).lower()}">{term[0].upper()}</p>'
            )
        other = (
            f" Also: {', '.join(o for o in others if not o.startswith(term[:4]))}."
            if [o for o in others if not o.startswith(term[:4])]
            else ""
        )
        text.append(
            f'<p class="entry" id="{anchor(term)}"><b>{html.escape(term)}</b> {html.escape(meaning)}{other} <a href="{url}.html">{html.escape(titles[url])}</a></p>'
        )
    return "\n\n".join(text) + "\n"
