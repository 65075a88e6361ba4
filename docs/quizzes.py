"""Questions at the end of each part of the course, answers folded, each with a link to the section that teaches it."""

QUIZZES = {  # part: (question, answer, lesson#section)
    "First steps": [
        (
            "Why can the reward not simply be differentiated?",
            "It is a number for a text that was sampled. A word was drawn or it was not; no weight flows into its points.",
            "learn/from_a_reward_to_ppo#1--what-is-to-be-maximised",
        ),
        (
            "What is ∇J as an average over samples?",
            "E[r(a)·∇log π(a)], the score function times the reward: cross-entropy on the policy's own samples, weighted by the reward.",
            "learn/from_a_reward_to_ppo#2--the-score-function-in-four-lines",
        ),
        (
            "Why does a baseline not bias the gradient?",
            "E[b·∇log π] = b·∇Σπ = b·∇1 = 0, for every b that does not look at the action.",
            "learn/from_a_reward_to_ppo#4--the-baseline",
        ),
        (
            "What does a good baseline buy, and what does a bad one cost?",
            "Variance: in the three-word world 6.40 falls to .99 with b = J, and rises to 55 with b = 12.4.",
            "learn/from_a_reward_to_ppo#4--the-baseline",
        ),
        (
            "Which weight makes old samples usable, and what is its price?",
            "ρ = π/π_old. It is right on average and adds variance, which multiplies from word to word.",
            "learn/from_a_reward_to_ppo#5--use-the-samples-twice",
        ),
        (
            "Without a trust region, where does the maximum of ρA on one batch lie?",
            "At a corner: one word for ever. ρA is linear in the policy.",
            "learn/from_a_reward_to_ppo#6--the-trust-region",
        ),
        (
            "A word of positive advantage has become 1.5 times as likely, ε = .2. What is its gradient?",
            "0: it has been encouraged enough.",
            "learn/from_a_reward_to_ppo#7--the-clip-and-the-min",
        ),
        (
            "And a word of negative advantage at ratio 1.5?",
            "It keeps its gradient, which leads back to 1: for a negative advantage the clip stops only what is below 1 − ε.",
            "learn/from_a_reward_to_ppo#7--the-clip-and-the-min",
        ),
        (
            "What is the best policy under a KL penalty with coefficient β?",
            "π* ∝ π_ref·exp(r/β), worth β·log Z.",
            "learn/from_a_reward_to_ppo#8--the-kl-penalty",
        ),
        (
            "What changes when the action is a sentence and not a word?",
            "Its log-probability is a sum over words. The four lines hold as they stand; padding and a mask come with it.",
            "learn/from_a_reward_to_ppo#9--sentences",
        ),
    ],
    "The objective": [
        (
            "Two responses of 3 and 2 tokens. What does a token of each weigh under token_mean, and under sequence_mean?",
            "1/5 and 1/5; 1/6 and 1/4.",
            "learn/masks#which-mean",
        ),
        (
            "Every response is worth −1. Which mean teaches the policy to write longer ones, and why?",
            "sequence_mean: each response divides by its own length, so a long failure is punished less per token.",
            "learn/masks#length-bias-exactly",
        ),
        (
            "Why select before the exponential, and not multiply by the mask after it?",
            "0·NaN is NaN, and the backward pass multiplies zero by infinity even where the value is clean.",
            "learn/kl#padding-in-the-kl",
        ),
        (
            "A reversed k3 is positive and grows with the drift. Which test catches it?",
            "A lopsided pair, far apart, weighted by the distribution that samples, against the enumerated KL.",
            "learn/kl#the-direction-trap",
        ),
        (
            "What does k1 do in the loss?",
            "Nothing on average: its gradient is ∇log π, whose mean is zero.",
            "learn/kl#in-the-reward-or-in-the-loss",
        ),
        (
            "What is the value after the last token?",
            "0, by definition. Whatever the value head says about the padding behind it must not enter.",
            "learn/advantages#what-was-expected-the-td-error",
        ),
        (
            "λ = 0 and λ = 1: what does each rely on?",
            "0 on the value head, and inherits its errors; 1 on what happened, and inherits its luck.",
            "learn/advantages#λ--0-and-λ--1",
        ),
        (
            "The policy loss in the log is 0 at the first step. Is something wrong?",
            "No. Whitened advantages have mean zero; the gradient is not zero.",
            "learn/policy_loss#the-loss-is-0-and-the-gradient-is-not",
        ),
        (
            "All rewards, the price of the KL among them, grow tenfold, and the values with them. What happens to the ratio clip, and to the value clip?",
            "The first cuts the same tokens. The second is ten times tighter, because c has the unit of the reward.",
            "learn/value_loss#why-it-depends-on-the-scale",
        ),
        (
            "Both responses of a pair lose a nat. What does DPO's loss say?",
            "Nothing. It sees only the difference.",
            "learn/preference#two-things-it-does-not-promise",
        ),
    ],
    "The model and the trainer": [
        (
            "Why does a decoder need left-padded prompts?",
            "So that the last column holds each row's last real token, and the response goes on right behind it.",
            "learn/agent",
        ),
        (
            "Which position of the logits belongs to token t?",
            "The one before it: logits at t − 1 predict token t.",
            "learn/agent",
        ),
        (
            "What does a value head start from, and why?",
            "Zero: it expects nothing, so the first advantages are made of rewards only (those still to come, faded by γλ per token), and not of noise.",
            "learn/agent",
        ),
        (
            "What does a reward model learn from a pair?",
            "−log σ(chosen − rejected): only the difference is trained, the zero is free.",
            "learn/reward_model",
        ),
        (
            "Where is a text's score read?",
            "At its last real token, which must be one that training has seen there.",
            "learn/quickstart#where-the-score-is-read",
        ),
        (
            "How good can a reward model be on labels of single readers?",
            "As good as somebody who knows the mean ratings, and no better: readers disagree. Quote that ceiling beside the accuracy.",
            "learn/quickstart#stage-2-the-reward-model",
        ),
        (
            "Two texts share a prompt and differ in their last word. What may not differ?",
            "Everything up to the difference: the model looks back only. A test for padding and positions.",
            "learn/agent",
        ),
        (
            "When does a LoRA policy need no second copy of its weights as a reference?",
            "While its adapters say nothing yet: the frozen weights are read without them, and the KL starts at 0. Adapters that have learnt are copied.",
            "guides/lora",
        ),
        (
            "Why are the log-probabilities of sampling and of training computed by one path?",
            "So that the ratio before the first step is 1. If it is not, nothing after it means anything.",
            "learn/trainer#3-annotate",
        ),
        (
            "A file holds 200 MiB of rows. How much memory does reading it take?",
            "A few MiB: rows are streamed, and each broken one is named with its line.",
            "guides/your_data",
        ),
        (
            "Which methods of the trainer do its equations (1) to (6)?",
            "`rollout` (1), `score` (2), `annotate` (3), `advantages` (4 and 5), `optimize` (6).",
            "learn/trainer#the-trainer",
        ),
        (
            "Which number must be 1 before the first update of every iteration?",
            "The ratio of each token.",
            "learn/trainer#6-the-loss-and-one-step-down-its-gradient",
        ),
        (
            "The reward rises while the entropy falls to 0 and the KL grows without end. What is it?",
            "Reward hacking. Read samples.",
            "learn/reading_the_log",
        ),
        (
            "What must a run restore to go on as if nothing had happened?",
            "Weights, the optimizer's moments, β, the place in the prompts and the state of every random generator.",
            "guides/resume",
        ),
        (
            "How many micro-batches may a minibatch be cut into without changing the objective?",
            "As many as you like, if each divides by the count of the whole minibatch.",
            "learn/masks#micro-batches",
        ),
        (
            "A sampler in bfloat16 writes for a policy in float32. What corrects for it?",
            "A capped weight π_old/π_sampler per token, a number without gradient.",
            "learn/trainer#when-the-sampler-is-not-quite-the-policy",
        ),
        (
            "Why are held-out prompts read with dice of their own?",
            "So that evaluating changes nothing in the run, and every evaluation asks the same.",
            "learn/evaluation",
        ),
        (
            "What does the doctor read?",
            "The metrics, settings and recorded tokens of a run; it names what looks wrong and where to look.",
            "guides/doctor",
        ),
        (
            "A loss is NaN. What stops, and when?",
            "The trainer, before the optimizer moves; it names the first number that is not finite.",
            "learn/trainer#what-the-trainer-refuses",
        ),
        (
            "Where does a new term of the loss go?",
            "Into `loss` of a subclass, one method.",
            "learn/trainer#change-the-loss",
        ),
    ],
    "Does it work?": [
        (
            "Best-of-8 costs how many nats at most?",
            "log 8 − 7/8 = 1.20.",
            "learn/quickstart#was-ppo-needed",
        ),
        (
            "What tells a hacked policy from a good one, if both scores rise?",
            "What nobody maximised: grammaticality, variety, the KL, and your own eyes.",
            "learn/quickstart#reward-hacking",
        ),
        (
            "A world where every response can be listed: what can be known there that cannot elsewhere?",
            "J, KL, the gradient and π*, exactly; so how far a trained policy is from the best.",
            "learn/exact_world",
        ),
        (
            "At the same β, do k2 and k3 in the loss end at the optimum of J?",
            "No: each goes where its own loss sends it.",
            "learn/exact_world",
        ),
        (
            "A probe fails. What have you learnt?",
            "Where to look: each is a task with one thing in it that can go wrong.",
            "learn/probes",
        ),
        (
            "Which must not change the answer: padding side, batch split, order of rows?",
            "None of them may.",
            "guides/invariances",
        ),
        (
            "Two libraries log `entropy`. Are the numbers comparable?",
            "Only if both leave the padding out. Compare on the same input.",
            "guides/same_name",
        ),
        (
            "What shows a bug that no metric shows?",
            "A test against something that knows better: an enumeration, a derivation, a second slow version.",
            "learn/failure_gallery",
        ),
        (
            "What does a smaller β cost besides KL?",
            "The way there: what the policy no longer says it can no longer find out about.",
            "learn/exact_world#reward-and-kl-for-every-β",
        ),
        (
            "You have a change of the loss. In which order do you test it?",
            "The ladder of probes, the invariances, and the doctor on a real run.",
            "learn/change_the_loss",
        ),
    ],
    "Verifiable rewards and agents": [
        (
            "What is the reward model of RLVR?",
            "There is none: a verifier, which is a program, checks the answer and returns 1 or 0.",
            "learn/verifiable_rewards#a-reward-without-a-model",
        ),
        (
            "A verifier passes wrong answers with .1 and fails right ones with .2, at random. What is left of the signal?",
            "1 − .1 − .2 = .7 of every expected gradient. The best policy stays the same.",
            "learn/verifiable_rewards#what-the-verifiers-errors-cost",
        ),
        (
            "Which errors of a verifier change the best policy?",
            "Those that are not random: a kind of wrong answer that always passes is learned.",
            "learn/verifiable_rewards#what-the-verifiers-errors-cost",
        ),
        (
            "How do you test a verifier before training?",
            "Right answers in several spellings should all pass; empty texts, the prompt, other answers and lists of guesses should all fail.",
            "learn/verifiable_rewards#test-the-verifier-before-it-pays",
        ),
        (
            "How often is a group of G answers flat, if each is right with probability p?",
            "p^G + (1 − p)^G. Such a group has no gradient.",
            "learn/verifiable_rewards#which-questions-teach",
        ),
        (
            "Which tokens of a dialogue are trained?",
            "Those that were sampled from the policy, in all its turns. The tool's tokens are read and not learned.",
            "learn/agents#which-tokens-are-trained",
        ),
        (
            "What follows the last token of a turn, for returns and values?",
            "The first token of the policy's next turn: a tool's text is no step.",
            "learn/agents#returns-across-a-hole",
        ),
        (
            "Why is a reward for every call dangerous?",
            "The policy makes more calls. Pay a change, or pay once, and less than a right answer earns.",
            "learn/agents#rewards-of-turns",
        ),
        (
            "What do the dialogues of a group share?",
            "The first prompt, and nothing later. So compare whole dialogues, and not the second turns with each other.",
            "learn/agents#groups-of-dialogues",
        ),
        (
            "Why is a finished dialogue never tokenized again?",
            "One text has several tokenizations. The policy sampled one of them; another has another probability, so the first ratio is not 1.",
            "learn/agents#never-tokenize-again",
        ),
        (
            "Who writes the texts in on-policy distillation, and who scores them?",
            "The student writes, and the teacher gives the log-probability of each token.",
            "learn/distillation#the-idea",
        ),
    ],
}


def quiz_page(titles: dict[str, str]) -> str:
    "Markdown; `titles` are the lessons' by their address."
    text = [
        "# Questions on each part of the course",
        "```{rst-class} subtitle\n```\n\nTo test yourself: answer, then unfold, then follow the link\n",
    ]
    for part, questions in QUIZZES.items():
        text.append(f"## {part}")
        for i, (question, answer, where) in enumerate(questions, 1):
            url, _, section = where.partition("#")
            link = f"{url}.html{'#' + section if section else ''}"
            text.append(
                f'<details class="quiz"><summary>{i}. {coded(question)}</summary><p>{coded(answer)} <a href="{link}">{coded(titles[url])}</a></p></details>'
            )
    return "\n\n".join(text) + "\n"


def coded(text: str) -> str:
    "HTML of a line that may hold `code`."
    import html
    import re

    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
