"""How this project and others compare: a section each, every cell a fact with the place it was read at and the day.

Sources are files of a repository at a commit, so that they go on saying what they said. Nothing here was heard of: what was looked for
and not found says so, and links to the tree that was looked through. To read a project again, change its commit, its day and its cells.
"""

import re
from urllib.parse import quote

QUESTIONS = {  # what a row is about: its key, and how the page calls it
    "for": "What it is for",
    "runs": "What runs where, how long",
    "ppo": "PPO for language models",
    "exercises": "Exercises, and who checks them",
    "numbers": "Numbers to check by hand, figures to move",
    "licence": "Licence; last change read",
    "not": "What it does not do",
}
EXTENT = {  # how an answer about PPO begins, and what that means
    "Whole loop": "sampling, rewards, advantages and updates of a language model with PPO",
    "Loss only": "a loss for tokens, and no loop around it",
    "Control only": "PPO, for control tasks and games",
    "Not": "none that was found, or another algorithm in its place",
}
OURS, READ = "instruct_goose", "2026-11-23"
LATER = "2026-11-26"
NOT_FOUND = "Not found"

PROJECTS = {  # name: (repository, commit, day it was read, {question: (fact, sources)}); a source is a path there, "" for the tree, an address, or "package name version"
    OURS: (
        "instruct-goose/instruct_goose",
        "main",
        READ,
        {
            "for": (
                "Learning PPO and RLHF for language models from notebooks, which export the package that trains.",
                ["README.md"],
            ),
            "runs": (
                "Every lesson on a CPU; the quickstart in about a minute on one core. Measured on one GPU, an H200.",
                ["README.md", "evidence/gpu.json"],
            ),
            "ppo": (
                "Whole loop, from prompts to the update; in one lesson against an optimum found by listing every response.",
                ["nbs/learn/16_trainer.ipynb", "nbs/learn/20_exact_world.ipynb"],
            ),
            "exercises": (
                "At the end of lessons; a checker tells the right answer from named mistakes. What needs only arithmetic also runs on its page.",
                ["nbs/learn/08_policy_loss.ipynb", "CONTRIBUTING.md"],
            ),
            "numbers": (
                "Lessons open with numbers to expect and derive them; sliders are drawn by the exported functions.",
                ["nbs/learn/08_policy_loss.ipynb"],
            ),
            "licence": ("Apache-2.0; the changes are listed.", ["LICENSE", "CHANGELOG.md"]),
            "not": (
                "No run on more than one GPU: data parallel and FSDP ran as two CPU processes, and DeepSpeed is refused. vLLM "
                "itself ran on a CPU, never on a GPU, and there is no generation server of its own. No recipe of a model beyond 135 million weights was measured; the three for the Hub "
                "were never run with their models. macOS and Windows are not tested.",
                [
                    "docs/know.md",
                    "nbs/guides/hub_recipes.ipynb",
                    "evidence/recipes.json",
                    "README.md",
                ],
            ),
        },
    ),
    "ARENA": (
        "callummcdougall/ARENA_3.0",
        "6644991468bc3d6121ee1f5ffbe97a025b252d12",
        READ,
        {
            "for": (
                "A programme of exercises: fundamentals, interpretability, reinforcement learning, evaluations, alignment science. Chapter 2 ends with RLHF.",
                ["README.md"],
            ),
            "runs": (
                "The RLHF day assumes an A100; a switch takes GPT-2 small for less than 24 GB. Colab notebooks. Exercises give minutes, from 5 to 60 each.",
                ["chapter2_rl/instructions/pages/04_[2.4]_RLHF.md"],
            ),
            "ppo": (
                "Whole loop, as exercises that end in a trainer class; LoRA and GRPO follow. Its first reward counts full stops.",
                ["chapter2_rl/instructions/pages/04_[2.4]_RLHF.md"],
            ),
            "exercises": (
                "Yes. Tests compare with a solution, and some messages name a mistake; solutions are folded.",
                [
                    "chapter2_rl/exercises/part4_rlhf/tests.py",
                    "chapter2_rl/instructions/pages/04_[2.4]_RLHF.md",
                ],
            ),
            "numbers": (
                "Tests with computed answers; on the RLHF page figures to move were not found.",
                [
                    "chapter2_rl/exercises/part4_rlhf/tests.py",
                    "chapter2_rl/instructions/pages/04_[2.4]_RLHF.md",
                ],
            ),
            "licence": (
                "No licence file in the tree; 2026-03-14, read in a fork's history of it.",
                [""],
            ),
        },
    ),
    "The RLHF book": (
        "natolambert/rlhf-book",
        "a66b0bf1103b590511e0503a2e9d93faea939a49",
        READ,
        {
            "for": (
                "A book on RLHF and post-training, with code for its chapters, diagrams and slides.",
                ["README.md"],
            ),
            "runs": (
                "Policy gradients with Qwen3-1.7B on one GPU of about 16 GB; `device: auto` falls back to a CPU. One distillation run is given as under 20 hours on 24 GB. A time for PPO was not found.",
                ["code/README.md", "code/policy_gradients/config.py"],
            ),
            "ppo": (
                "Whole loop: ppo.yaml trains Qwen3-1.7B with a value model, on words to be spelt backwards. Nine more configurations, from REINFORCE to MaxRL, share the script.",
                [
                    "code/policy_gradients/configs/ppo.yaml",
                    "code/policy_gradients/configs",
                    "code/policy_gradients/train.py",
                ],
            ),
            "exercises": (
                "Suggested experiments at the end of chapters 4, 5, 6, 8, 9 and 12; a checker was not found.",
                ["code/README.md", "book/chapters/06-policy-gradients.md"],
            ),
            "numbers": (
                "An example of loss aggregation with the gradients it prints, in chapter 6. Figures to move were not found.",
                ["book/chapters/06-policy-gradients.md", "book/templates"],
            ),
            "licence": ("Chapters CC BY-NC-SA 4.0, the rest MIT; 2026-08-21.", ["README.md"]),
        },
    ),
    "CleanRL": (
        "vwxyzjn/cleanrl",
        "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        READ,
        {
            "for": (
                "Deep reinforcement learning with one file for each variant of an algorithm, benchmarked.",
                ["README.md"],
            ),
            "runs": (
                "ppo.py on CPU or GPU; its benchmark switches the GPU off. Run times are tabled (CartPole 10.5, without a unit).",
                [
                    "cleanrl/ppo.py",
                    "docs/get-started/benchmark-utility.md",
                    "docs/benchmark/ppo_runtimes.md",
                ],
            ),
            "ppo": (
                "Control only: classic control, Atari, Procgen, MuJoCo, Isaac Gym. A file for language models was not found.",
                ["docs/rl-algorithms/ppo.md", "cleanrl"],
            ),
            "exercises": (NOT_FOUND + ".", ["docs"]),
            "numbers": (
                "Thirteen details of PPO with links to lines of code, each logged metric explained, returns with their spread. Figures to move were not found.",
                ["docs/rl-algorithms/ppo.md", "docs/benchmark/ppo.md"],
            ),
            "licence": ("MIT; 2026-04-20.", ["LICENSE"]),
        },
    ),
    "Spinning Up": (
        "openai/spinningup",
        "038665d62d569055401d91856abb287263096178",
        READ,
        {
            "for": (
                "An introduction to deep reinforcement learning: theory, a reading list, short implementations, exercises.",
                ["readme.md"],
            ),
            "runs": (
                "Several CPU processes over MPI; code for a GPU was not found. Exercises give times, from 3 to about 10 minutes a run.",
                ["docs/user/running.rst", "docs/spinningup/exercises.rst"],
            ),
            "ppo": (
                "Control only, in MuJoCo and Gym.",
                ["docs/algorithms/ppo.rst", "docs/spinningup/bench.rst"],
            ),
            "exercises": (
                "Five. The first two check themselves, against a solution and by a score; the third has no check; the last two compare runs, one with a bug.",
                ["docs/spinningup/exercises.rst"],
            ),
            "numbers": (
                "A score or a solution to reach in the exercises; figures to move were not found.",
                [
                    "spinup/exercises/pytorch/problem_set_1/exercise1_1.py",
                    "docs/spinningup/exercises.rst",
                ],
            ),
            "licence": ("MIT, in maintenance; 2020-02-07.", ["LICENSE", "readme.md"]),
        },
    ),
    "TRL": (
        "huggingface/trl",
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        READ,
        {
            "for": (
                "Post-training of transformers: trainers for SFT, GRPO, DPO and others, on one GPU or many machines.",
                ["README.md"],
            ),
            "runs": (
                "From one GPU up: notebooks for free Colab GPUs, several of them GRPO; DDP, DeepSpeed and FSDP through accelerate. A time was not found.",
                [
                    "docs/source/distributing_training.md",
                    "examples/notebooks/README.md",
                ],
            ),
            "ppo": (
                "Not since 1.13.0, which removed PPOTrainer and the models with a value head (pull request 7020: unmaintained, hardly used). "
                "The whole loop is in trl.experimental.ppo of 1.12.0.",
                [
                    "package trl 1.13.0",
                    "package trl 1.12.0",
                    "trl/experimental/ppo/ppo_trainer.py",
                ],
            ),
            "exercises": (NOT_FOUND + ".", ["docs/source"]),
            "numbers": (
                "Each metric that PPO logged is explained. Worked numbers and figures to move were not found.",
                ["docs/source/ppo_trainer.md", "docs/source"],
            ),
            "licence": (
                "Apache-2.0; 2026-07-24 in the tree, 2026-10-15 in the package.",
                ["LICENSE", "package trl 1.16.0"],
            ),
        },
    ),
    "torchtune": (
        "pytorch/torchtune",
        "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
        READ,
        {
            "for": (
                "Recipes and models for post-training in PyTorch: SFT, distillation, DPO, PPO, GRPO, quantisation-aware training.",
                ["README.md"],
            ),
            "runs": (
                "PPO on one GPU; its recipe says that a CPU is not supported. The Mistral 7B configuration names an A100 of 80 GB. A time was not found.",
                [
                    "recipes/ppo_full_finetune_single_device.py",
                    "recipes/configs/mistral/7B_full_ppo_low_memory.yaml",
                ],
            ),
            "ppo": (
                "Whole loop, all weights on a single device; no LoRA, no second device.",
                ["README.md", "recipes/ppo_full_finetune_single_device.py"],
            ),
            "exercises": (NOT_FOUND + ".", ["docs/source"]),
            "numbers": (
                "Tests of its losses hold expected values. Worked numbers in the text and figures to move were not found.",
                ["tests/torchtune/rlhf/loss/test_ppo_loss.py", "docs/source/tutorials"],
            ),
            "licence": (
                "BSD 3-Clause, no longer maintained; 2026-04-23.",
                ["LICENSE", "README.md"],
            ),
        },
    ),
    "DI-engine": (
        "opendilab/DI-engine",
        "d0b21d065b2d80317cc16b28a95301be8871d950",
        READ,
        {
            "for": (
                "A library of deep reinforcement learning: control, games, many agents, offline, imitation, planning.",
                ["README.md"],
            ),
            "runs": (
                "PPO for CartPole is set to the CPU; the first tutorial calls itself three minutes. A time for language models was not found.",
                ["dizoo/classic_control/cartpole/config/cartpole_ppo_config.py", "README.md"],
            ),
            "ppo": (
                "Loss only: policy and value losses whose text names RLHF. Among the policies PromptPG and PromptAWR were found, and no PPO loop around a language model.",
                ["ding/rl_utils/ppo.py", "ding/policy"],
            ),
            "exercises": (
                "Not found in the repository. It links to a course of its own, PPO x Family, which was not read.",
                ["README.md"],
            ),
            "numbers": (
                "The tests of these losses ask for shapes, finite values and gradients. Worked numbers were not found.",
                ["ding/rl_utils/tests/test_ppo_rlhf.py"],
            ),
            "licence": ("Apache-2.0; 2025-12-07.", ["LICENSE"]),
        },
    ),
    "The original instructGOOSE": (
        "xrsrke/instructGOOSE",
        "5b9ac3f4a7a834b15a0771104f7d44cb07181c50",
        READ,
        {
            "for": (
                "An implementation of RLHF after InstructGPT, in nbdev notebooks.",
                ["README.md"],
            ),
            "runs": (
                "GPT-2 in the front page's example; the reward model's device is cuda unless another is named. A time was not found.",
                ["README.md", "nbs/03_reward_model.ipynb"],
            ),
            "ppo": (
                "Whole loop, on its front page. The second term of its loss multiplies ratio and clipped ratio, where PPO has the advantage.",
                ["README.md", "instruct_goose/trainer.py"],
            ),
            "exercises": (NOT_FOUND + ".", ["nbs"]),
            "numbers": (
                "Three losses that the example printed. Its tests of the loss ask for a number, and not which.",
                ["README.md", "tests/test_rlhf_trainer.py"],
            ),
            "licence": (
                "MIT in LICENSE, Apache-2.0 in settings.ini; 2023-04-07.",
                ["LICENSE", "settings.ini"],
            ),
        },
    ),
    "RLHF Illustrated Guide": (
        "deepak-karkala/illustrated-rlhf",
        "7afe92546981fe2b53a82bbbef6b7fdedd267045",
        READ,
        {
            "for": (
                "Twelve web modules after the RLHF book, with analogies, figures and questions.",
                ["README.md", "content/modules"],
            ),
            "runs": (
                "In a browser; from source with Node 18. Code that trains a model was not found.",
                ["README.md", "src"],
            ),
            "ppo": (
                "Not: its PPO playground moves a ratio through ten fixed advantages.",
                ["src/components/visualizations/ppo-training-playground.tsx"],
            ),
            "exercises": (
                "Multiple choice, five questions to a module, checked on the page and explained.",
                [
                    "src/components/modules/assessment-quiz.tsx",
                    "content/modules/policy-gradients.mdx",
                ],
            ),
            "numbers": (
                "Sliders for PPO's clip, a KL price, DPO's β and more. The clipped objective there is clip(r)·A without the min: r = .5, A = .8, ε = .2 shows .64, PPO has .40.",
                [
                    "src/components/visualizations",
                    "src/components/visualizations/ppo-clip-visualizer.tsx",
                ],
            ),
            "licence": (
                "MIT says the README; no licence file in the tree; 2026-01-07.",
                ["README.md", ""],
            ),
        },
    ),
    "RLHF in notebooks": (
        "ash80/RLHF_in_notebooks",
        "f73d8ed4b4763bbadadc86cc6cd3ec555f377f54",
        READ,
        {
            "for": (
                "Three notebooks beside a video: SFT, reward model and PPO, for GPT-2 and the sentiment of film reviews.",
                ["README.md"],
            ),
            "runs": (
                "Local or Colab; the PPO notebook is set to a T4. A time was not found.",
                ["README.md", "3-RLHF.ipynb"],
            ),
            "ppo": ("Whole loop.", ["3-RLHF.ipynb"]),
            "exercises": (NOT_FOUND + ".", [""]),
            "numbers": (
                "Stored outputs: a mean score of .07 before and .66 after, on held-out prompts. Figures to move were not found.",
                ["3-RLHF.ipynb"],
            ),
            "licence": ("MIT; 2025-06-20.", ["LICENSE"]),
        },
    ),
    "Post-Training Explorer": (
        "provandal/post-training-explorer",
        "ace2f0c072cec6551afd34201c6d1a0564e3fac2",
        READ,
        {
            "for": (
                "A guided tour made for a webinar: prompts, retrieval, SFT, DPO and GRPO on one classification task.",
                ["README.md"],
            ),
            "runs": (
                "The tour in a browser, from precomputed data. Training of SmolLM2-360M on a T4: about 12 minutes of SFT, 15 of DPO, 35 of GRPO.",
                ["README.md", "scripts/README.md"],
            ),
            "ppo": (
                "Not: GRPO. PPO is named in the text.",
                ["scripts", "app/src/stops/DPOPreferences.jsx"],
            ),
            "exercises": (NOT_FOUND + ".", ["app/src"]),
            "numbers": (
                "Demonstrations to click through. Worked numbers were not found.",
                ["README.md", "app/src/stops/GRPOGenerations.jsx"],
            ),
            "licence": ("MIT; 2026-04-24.", ["LICENSE"]),
        },
    ),
    "smol course": (
        "huggingface/smol-course",
        "32dde01a1110fed92a03cc16316c868645a35e9f",
        READ,
        {
            "for": (
                "A course on fine-tuning small language and vision models with TRL and transformers.",
                ["README.md", "units/en/unit0/1.mdx"],
            ),
            "runs": (
                "Unit 1 asks for a GPU of 16 GB, own or hosted. Three to four hours a week, a week to a chapter.",
                ["units/en/unit1/3.md", "units/en/unit0/1.mdx"],
            ),
            "ppo": (
                "Not: a unit on reinforcement learning is announced for October 2025 and is not among the units in the tree.",
                ["README.md", "units/en"],
            ),
            "exercises": (
                "A quiz and an assignment to a unit; models are handed in to a leaderboard.",
                ["units/en/unit1/1.md", "README.md"],
            ),
            "numbers": (NOT_FOUND + ".", ["units/en"]),
            "licence": ("Apache-2.0; 2026-04-15.", ["LICENSE"]),
        },
    ),
    "nanochat": (
        "karpathy/nanochat",
        "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        LATER,
        {
            "for": (
                "A small code base for a whole language model: tokenizer, pretraining, SFT, evaluation, a chat, and reinforcement learning on GSM8K.",
                ["README.md", "scripts/chat_rl.py"],
            ),
            "runs": (
                "One node: about 1.5 hours on eight H100s to the capability of GPT-2, or one GPU and eight times as long; a small example for a CPU. A time for its reinforcement learning was not found.",
                ["README.md", "runs"],
            ),
            "ppo": (
                "Not: on policy, with r − mean as the advantage and a mean over tokens, close to REINFORCE as its script says.",
                ["scripts/chat_rl.py"],
            ),
            "exercises": (NOT_FOUND + ".", [""]),
            "numbers": (
                "A leaderboard of times and scores of pretraining. Worked numbers and figures to move were not found.",
                ["README.md"],
            ),
            "licence": ("MIT; 2026-07-03.", ["LICENSE"]),
        },
    ),
    "Tinker Cookbook": (
        "thinking-machines-lab/tinker-cookbook",
        "9dfcc3a2cf44432d621a01005073dc6d76a1e87a",
        LATER,
        {
            "for": (
                "Recipes and tutorials for Tinker, a hosted service that trains adapters: SFT, RL with verified rewards, preferences, distillation, tools.",
                ["README.md"],
            ),
            "runs": (
                "The models run at the service, which needs an account and a key; the loops run on your machine.",
                ["README.md"],
            ),
            "ppo": (
                "Loss only: ppo is a loss function of the service, importance_sampling the default. The minimal loop centres rewards in groups; a value model was not found in the files that were read.",
                ["tinker_cookbook/rl/train.py", "tinker_cookbook/recipes/rl_loop.py"],
            ),
            "exercises": (NOT_FOUND + ".", ["tutorials"]),
            "numbers": (
                "Recipes give commands and expected results. Figures to move were not found.",
                ["README.md", "tinker_cookbook/recipes/README.md"],
            ),
            "licence": ("Apache-2.0; 2026-08-19.", ["LICENSE"]),
        },
    ),
    "Hugging Face course, chapter 12": (
        "huggingface/course",
        "16af5667532d6966f0fe83f44cc848dd7698a215",
        LATER,
        {
            "for": (
                "A chapter of a course on language models: reinforcement learning, DeepSeek-R1's paper, GRPO with TRL.",
                ["chapters/en/chapter12/1.mdx"],
            ),
            "runs": (
                "A notebook for Colab with SmolLM-135M, LoRA, TRL 0.14.0 and flash attention. A time was not found in the pages that were read.",
                ["chapters/en/chapter12/5.mdx"],
            ),
            "ppo": ("Not: GRPO.", ["chapters/en/chapter12"]),
            "exercises": (
                "Practical exercises as notebooks; a checker was not found.",
                ["chapters/en/chapter12/5.mdx"],
            ),
            "numbers": (NOT_FOUND + ".", ["chapters/en/chapter12"]),
            "licence": ("Apache-2.0; 2026-04-15.", ["LICENSE"]),
        },
    ),
    "CS336 assignment 5": (
        "stanford-cs336/assignment5-alignment",
        "eb2c562e05802d3c9ee4c4ec2eec43b104d77e9e",
        READ,
        {
            "for": (
                "A university assignment: SFT, expert iteration and GRPO with verified rewards on MATH, with an optional part on safety and RLHF.",
                ["CHANGELOG.md", "README.md", "tests/adapters.py"],
            ),
            "runs": (
                "Not found outside the handout, a PDF that was not read.",
                ["README.md", "cs336_spring2025_assignment5_alignment.pdf"],
            ),
            "ppo": (
                "Not: REINFORCE with a baseline and GRPO's clipped loss.",
                ["tests/adapters.py"],
            ),
            "exercises": (
                "Yes. The learner's functions are put into adapters, and tests compare them with stored results.",
                ["tests/adapters.py", "tests/_snapshots"],
            ),
            "numbers": (
                "Stored results of each function. Figures to move were not found.",
                ["tests/_snapshots"],
            ),
            "licence": ("No licence file in the tree; 2025-06-13.", [""]),
        },
    ),
    "Build a Reasoning Model (From Scratch)": (
        "rasbt/reasoning-from-scratch",
        "f79c9cd0ae7d824aa4e9a9bc2ca4a85167f81958",
        READ,
        {
            "for": (
                "The code of a book: inference-time scaling, GRPO with verified rewards and distillation, on Qwen3.",
                ["README.md"],
            ),
            "runs": (
                "Chapters 2 to 4 on CPU or GPU, a GPU recommended for 5 and 6. A time for GRPO was not found.",
                ["README.md", "ch06/02_rlvr_grpo_scripts_intro/README.md"],
            ),
            "ppo": (
                "Not: GRPO. PPO is named in the text.",
                ["ch06/01_main-chapter-code/ch06_main.ipynb"],
            ),
            "exercises": (
                "In each chapter, with solution notebooks; a checker was not found.",
                ["README.md", "ch06/01_main-chapter-code/ch06_exercise-solutions.ipynb"],
            ),
            "numbers": (
                "A few rollouts carried through reward, advantage and loss; a table of accuracies. Figures to move were not found.",
                [
                    "ch06/01_main-chapter-code/ch06_main.ipynb",
                    "ch06/02_rlvr_grpo_scripts_intro/README.md",
                ],
            ),
            "licence": ("Apache-2.0; 2026-04-21.", ["LICENSE"]),
        },
    ),
    "Hands-On Modern RL": (
        "walkinglabs/hands-on-modern-rl",
        "587258847cd11de768efaa6de11922155a354a7e",
        READ,
        {
            "for": (
                "A course from CartPole to RLHF, DPO, GRPO, agents and vision, in Chinese and English.",
                [
                    "https://github.com/walkinglabs/hands-on-modern-rl/blob/1ecc5e05349633ddec7e33893a4ae2f5d3dbdbde/README.md"
                ],
            ),
            "runs": (
                "Experiments on hosted notebooks, of CPU or GPU; for language models a GPU is recommended. A time was not found.",
                [
                    "code/README.md",
                    "https://github.com/walkinglabs/hands-on-modern-rl/blob/1ecc5e05349633ddec7e33893a4ae2f5d3dbdbde/README.md",
                ],
            ),
            "ppo": (
                "Whole loop, called simplified by its script: one ratio to a response from its mean log-probability, the whitened score as advantage, no value head in the update.",
                ["code/chapter08_rlhf/rlhf_ppo_train.py"],
            ),
            "exercises": (
                "A checker was not found in the files that were read.",
                ["code/README.md"],
            ),
            "numbers": (NOT_FOUND + " in the files that were read.", ["code/README.md"]),
            "licence": (
                "CC BY-NC-SA 4.0; 2026-08-19 is the last entry of its news.",
                [
                    "https://github.com/walkinglabs/hands-on-modern-rl/blob/1ecc5e05349633ddec7e33893a4ae2f5d3dbdbde/README.md"
                ],
            ),
        },
    ),
}


def source_url(repo: str, commit: str, source: str) -> str:
    "Where a source is read: an address as it stands, a file or folder of the repository at the commit."
    if source.startswith("https://"):
        return source
    if not source:
        return f"https://github.com/{repo}/tree/{commit}"
    kind = "blob" if re.search(r"\.\w+$|(^|/)(LICENSE|VERSION)$", source) else "tree"
    return f"https://github.com/{repo}/{kind}/{commit}/{quote(source)}"


def label(source: str) -> str:
    "What a link to a source is called."
    return re.sub(r"[\[\]]", "", source.rstrip("/").rpartition("/")[2]) or "the tree"


def cell(name: str, question: str) -> str:
    "A fact, its sources, the day."
    repo, commit, day, facts = PROJECTS[name]
    fact, sources = facts[question]
    linked = []
    for source in sources:
        where = f"../{source}" if name == OURS else source_url(repo, commit, source)
        is_package = source.startswith("package ")
        linked.append(source if is_package else f"[{label(source)}]({where})")
    return f"{fact} ({', '.join(linked)}; {day})"


def extent(name: str) -> str:
    "How much of PPO for language models a project has: the beginning of its answer."
    return next(e for e in EXTENT if PROJECTS[name][3]["ppo"][0].startswith(e))


def compare_page() -> str:
    "Markdown; links are those of a notebook in nbs/."
    text = [
        "# Compared with others",
        "```{rst-class} subtitle\n```\n\nWhat each project is for, what it runs on, what of PPO it has: a fact, a source, a day\n",
        'Each fact was read at the place behind its link, at the commit that the link names, on the day beside it. "Not found" means that it was looked for there; '
        "it may exist elsewhere. Courses that have appeared of late stand below the older projects. What the libraries compute under one name is in [the guide](guides/same_name.ipynb), "
        "what they cost under [How fast](../docs/speed.md).",
        "## PPO for language models, who has what",
    ]

    def link(name):
        return f"[{name}](#{re.sub(r'[^a-z0-9_ -]', '', name.lower()).replace(' ', '-')})"

    text.append(
        "\n".join(
            f"- **{e}** ({meaning}): {', '.join(link(n) for n in PROJECTS if extent(n) == e)}."
            for e, meaning in EXTENT.items()
        )
    )
    for name, (repo, _, _, facts) in PROJECTS.items():
        rows = [f"| {QUESTIONS[q]} | {cell(name, q)} |" for q in facts]
        text.append(f"## {name}")
        if name != OURS:
            text.append(f"[{repo}](https://github.com/{repo})")
        text.append("| asked | found |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(text) + "\n"
