// Five experiments: a question, the runs that answer it, and the answer, which appears when they have been seen.

export const EXPERIMENTS = [
  { name: "kl", title: "Take the KL penalty away", question: "With β = 0 the policy may leave the reference model for free. The reward model pays per word. What will the texts look like after 120 iterations?",
    runs: [{ label: "β = 0, 120 iterations", settings: { beta: 0 }, iterations: 120 }],
    answer: "ANSWER" },
  { name: "clip", title: "Take the clip away", question: "Each batch is used sixteen times. What does the clip prevent?",
    runs: [{ label: "ε = 0.2", settings: { epochs: 16 }, iterations: 40 }, { label: "no clip", settings: { epochs: 16, clip: 1e6 }, iterations: 40 }],
    answer: "ANSWER" },
  { name: "lambda", title: "λ = 0 against λ = 1", question: "The score comes after the last word. With λ = 0 a word learns only from the value of the next state, with λ = 1 from the score itself. Which run learns faster?",
    runs: [{ label: "λ = 0", settings: { lam: 0 }, iterations: 40 }, { label: "λ = 1", settings: { lam: 1 }, iterations: 40 }],
    answer: "ANSWER" },
  { name: "group", title: "A group of 2 against 16", question: "GRPO compares a response with the others of its group. Is a group of two enough?",
    runs: [{ label: "groups of 2", settings: { algorithm: "grpo", kl_placement: "loss", beta: .3, group_size: 2 }, iterations: 60 },
      { label: "groups of 16", settings: { algorithm: "grpo", kl_placement: "loss", beta: .3, group_size: 16 }, iterations: 60 }],
    answer: "ANSWER" },
  { name: "rate", title: "A learning rate too high", question: "Ten times the learning rate: ten times as fast?",
    runs: [{ label: "0.03", settings: { lr: .03 }, iterations: 40 }],
    answer: "ANSWER" }
]
