// Five experiments: a question, the runs that answer it, and the answer, which appears when they have been seen.

export const EXPERIMENTS = [
  { name: "kl", title: "Take the KL penalty away", question: "With β = 0 the policy may leave the reference model for free. The reward model pays per word. What will the texts look like after 120 iterations?",
    runs: [{ label: "β = 0, 120 iterations", settings: { beta: 0 }, iterations: 120 }],
    answer: "The score of the reward model goes on rising, and the sentences fall apart. Far from the reviews that it was fitted to, its score means nothing. The policy finds that out before you do: this is over-optimisation. The human score stays high, because it reads single words. Only the grammar, the word pairs and your eyes object. (One seed in ten settles on a single sentence instead and repeats it.) The KL penalty keeps the policy near the reference, where the reward model is right." },
  { name: "clip", title: "Take the clip away", question: "Each batch is used eight times. What does the clip prevent?",
    runs: [{ label: "ε = 0.2", settings: { epochs: 8 }, iterations: 40 }, { label: "no clip", settings: { epochs: 8, clip: 1e6 }, iterations: 40 }],
    answer: "It keeps the policy from following one batch too far. With the clip the run ends at a human score of 2.7 to 3.1. Without it the KL jumps within a few iterations, and the run stays behind or ends in a text like “.”. Which of the two depends on the seed: try another one." },
  { name: "lambda", title: "λ = 0 against λ = 1", question: "The score comes after the last word. With λ = 0 a word learns only from the value of the next state, with λ = 1 from the score itself. Which run learns faster?",
    runs: [{ label: "λ = 0", settings: { lam: 0 }, iterations: 40 }, { label: "λ = 1", settings: { lam: 1 }, iterations: 40 }],
    answer: "λ = 1. With λ = 0 hardly anything is learnt in 40 iterations. The value head must first carry the score from the last word to the one before, then to the next, and until then the policy has nothing to follow. With λ = 1 every word learns from the score at once, at the price of more noise." },
  { name: "group", title: "A group of 2 against 16", question: "GRPO compares a response with the others of its group. Is a group of two enough?",
    runs: [{ label: "groups of 2", settings: { algorithm: "grpo", kl_placement: "loss", beta: .3, group_size: 2 }, iterations: 60 },
      { label: "groups of 16", settings: { algorithm: "grpo", kl_placement: "loss", beta: .3, group_size: 16 }, iterations: 60 }],
    answer: "It learns, but less. In a group of two every advantage is +0.7 or −0.7, whether the difference was large or tiny. So the best responses of a batch stand out less, and the KL penalty weighs more beside them: groups of two stay nearer to the reference. Groups of sixteen go further, and lose more of the grammar." },
  { name: "rate", title: "A learning rate too high", question: "Ten times the learning rate. Ten times as fast?",
    runs: [{ label: "0.03", settings: { lr: .03 }, iterations: 40 }],
    answer: "No. Within five iterations nearly all variety is gone: look at the entropy. The policy settles on the first sentence that paid, and all responses are alike. On most seeds its reward-model score is less than half of what the default settings reach, and no better sentence is sampled again." }
]
