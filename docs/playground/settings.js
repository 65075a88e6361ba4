// The settings: `PlaygroundSettings` of the guide *The playground*, their sliders, and the address that holds them.

export const DEFAULTS = { algorithm: "ppo", beta: .25, kl_placement: "reward", clip: .2, lam: .95, lr: 3e-3, epochs: 2, minibatches: 2,
  batch_size: 64, group_size: 8, temperature: 1, ent_coef: 0, vf_coef: .5, seed: 0 }

// what changes with the algorithm, where the address says nothing else: GRPO's paper has the KL penalty in the loss
export const PER_ALGORITHM = { ppo: {}, rloo: {}, reinforce: {}, grpo: { kl_placement: "loss", beta: .3 } }

export const NO_CLIP = 1e6

// one slider each; `uses` are the algorithms that read it, all without
export const SLIDERS = [
  { name: "beta", label: "KL coefficient β", values: [0, .02, .05, .1, .15, .2, .25, .3, .4, .5, .75, 1],
    help: "The price of leaving the reference model. At 0 it is free." },
  { name: "clip", label: "Clip ε", values: [.02, .05, .1, .2, .3, .5, 1, NO_CLIP], show: x => x >= NO_CLIP ? "off" : String(x), uses: ["ppo", "grpo", "rloo"],
    help: "How far one batch may move a word's probability, as a ratio from 1 − ε to 1 + ε." },
  { name: "lam", label: "GAE λ", values: [0, .25, .5, .75, .9, .95, 1], uses: ["ppo"],
    help: "0: trust the value head alone. 1: trust the reward that came at the end." },
  { name: "lr", label: "Learning rate", values: [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], help: "The size of Adam's step." },
  { name: "epochs", label: "Epochs", values: [1, 2, 4, 8, 16], help: "How often each batch is used." },
  { name: "batch_size", label: "Batch", values: [16, 32, 64, 128], help: "Responses in an iteration." },
  { name: "group_size", label: "Group", values: [2, 4, 8, 16], uses: ["grpo", "rloo"], help: "Responses that are compared with each other." },
  { name: "temperature", label: "Temperature", values: [.5, .7, .85, 1, 1.2, 1.5], help: "Above 1 the policy samples rarer words." },
  { name: "ent_coef", label: "Entropy bonus", values: [0, .001, .003, .01, .03, .1], help: "Pays the policy for staying undecided." },
  { name: "seed", label: "Seed", values: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], help: "Of the random numbers. A new seed starts a new run.", restarts: true },
].map(s => ({ show: x => s.name === "temperature" ? x.toFixed(2) : String(x), ...s }))

export const CHOICES = {
  algorithm: { ppo: "PPO", grpo: "GRPO", rloo: "RLOO", reinforce: "REINFORCE" },
  kl_placement: { reward: "in the reward", loss: "in the loss" }
}

// ?algorithm=grpo&beta=0.1 → settings; what is no number, or out of range, is left out
export function fromAddress(search) {
  const asked = new URLSearchParams(search), algorithm = asked.get("algorithm") in CHOICES.algorithm ? asked.get("algorithm") : "ppo"
  const settings = { ...DEFAULTS, ...PER_ALGORITHM[algorithm], algorithm }
  if (asked.get("kl_placement") in CHOICES.kl_placement) settings.kl_placement = asked.get("kl_placement")
  for (const { name, values } of SLIDERS) {
    const x = Number(asked.get(name)), whole = Number.isInteger(values[1])
    const most = name === "seed" ? 2 ** 32 - 1 : name === "clip" ? NO_CLIP : Math.max(...values) * (whole ? 1 : 10)
    if (asked.get(name) && x >= 0 && x <= most && (x > 0 || values.includes(0)) && (!whole || Number.isInteger(x))) settings[name] = x
  }
  if (settings.batch_size < 2 || settings.batch_size % settings.group_size || settings.group_size < 2) Object.assign(settings, { batch_size: 64, group_size: 8 })
  const iterations = Math.min(10000, Math.max(0, Math.floor(Number(asked.get("iterations")) || 0)))
  const word = name => /^[\w -]+$/.test(asked.get(name)) ? asked.get(name) : null
  return { settings, iterations, edit: word("edit"), loss: word("loss"), embed: asked.has("embed"), experiment: word("experiment") }
}

// the settings that are not the default, as an address
export function toAddress(settings) {
  const usual = { ...DEFAULTS, ...PER_ALGORITHM[settings.algorithm] }, asked = new URLSearchParams()
  for (const [name, x] of Object.entries(settings)) if (name === "algorithm" ? x !== "ppo" : x !== usual[name]) asked.set(name, x)
  return String(asked)
}
