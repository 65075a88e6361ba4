"What was written and what it earned: rollouts, prompts, samplers, rewards."
