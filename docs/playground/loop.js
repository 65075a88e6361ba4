// The training loop: `sample`, `train` and `evaluate` of the guide *The playground*.
import { distinct2 } from "./grammar.js"
import { OWN_OBJECTIVE, entropy, logSoftmax, lossToLogits } from "./losses.js"
import { Adam } from "./optimizer.js"
import { CONTEXT, END, T, Policy, contextOf, distinctContexts } from "./policy.js"
import { Splitmix32 } from "./random.js"

const mean = xs => xs.reduce((a, x) => a + x, 0) / xs.length

// aₜ ~ π(·|sₜ) until <end>, at most 16 tokens: `sample`
export function sample(policy, generator, n, temperature) {
  const ids = new Int32Array(n * T), logprobs = new Float64Array(n * T), values = new Float64Array(n * T), lengths = new Array(n).fill(0)
  const V = policy.vocab
  let alive = lengths.map((_, b) => b)
  for (let t = 0; t < T && alive.length; t++) {
    const contexts = new Int32Array(alive.length * CONTEXT), u = generator.uniform(n)
    alive.forEach((b, k) => contextOf(ids, b * T, t, contexts, k))
    const { distinct, state } = distinctContexts(contexts), { logits, values: V_t } = policy.forward(distinct)
    const table = logSoftmax(logits, V, temperature), below = cumulative(table, V)
    alive.forEach((b, k) => {
      const at = state[k] * V, token = draw(below.subarray(at, at + V), u[b])
      ids[b * T + t] = token
      logprobs[b * T + t] = table[at + token]
      values[b * T + t] = V_t[state[k]]
      lengths[b]++
    })
    alive = alive.filter(b => ids[b * T + t] !== END)
  }
  return { ids, lengths, logprobs, values }
}

// Σ π over the words so far, row by row
function cumulative(table, vocab) {
  const below = new Float64Array(table.length)
  for (let i = 0; i < table.length; i++) below[i] = Math.exp(table[i]) + (i % vocab ? below[i - 1] : 0)
  return below
}

// the first word whose cumulative probability exceeds u
function draw(below, u) {
  const found = below.findIndex(x => x > u * below[below.length - 1])
  return found < 0 ? below.length - 1 : found
}

// log π(aₜ|sₜ), Vₜ and S(sₜ) of the real tokens of these rows, one after the other: `read`
export function read(policy, batch, rows, temperature) {
  const V = policy.vocab, places = rows.flatMap(b => Array.from({ length: batch.lengths[b] }, (_, t) => [b, t]))
  const contexts = new Int32Array(places.length * CONTEXT), tokens = places.map(([b, t]) => batch.ids[b * T + t])
  places.forEach(([b, t], k) => contextOf(batch.ids, b * T, t, contexts, k))
  const { distinct, state } = distinctContexts(contexts), pass = policy.forward(distinct)
  const table = logSoftmax(pass.logits, V, temperature), probs = new Float64Array(table.length)
  const ofState = Float64Array.from({ length: distinct.length / CONTEXT }, (_, i) => entropy(table, i * V, V, probs))
  const perToken = numbers => Float64Array.from(state, i => numbers[i])
  return { pass, state, table, probs, tokens, entropy: ofState, logprobs: Float64Array.from(tokens, (token, k) => table[state[k] * V + token]),
    entropies: perToken(ofState), values: perToken(pass.values) }
}

// the numbers of `read` back in rows of 16
function inRows(numbers, batch) {
  const out = new Float64Array(batch.ids.length)
  let k = 0
  batch.lengths.forEach((n, b) => { for (let t = 0; t < n; t++) out[b * T + t] = numbers[k++] })
  return out
}

const rowsOf = batch => batch.lengths.map((_, b) => b)
const idsOf = (batch, b) => Array.from(batch.ids.subarray(b * T, b * T + batch.lengths[b]))

export class Trainer {
  // objective: what compares and what gives the loss's gradient, here or in Python
  constructor(reference, judge, settings, objective = OWN_OBJECTIVE) {
    Object.assign(this, { reference, judge, settings, objective, policy: reference.copy(), generator: new Splitmix32(settings.seed), iteration: 0 })
    this.optimizer = new Adam(reference.weights.length)
  }

  // what a batch of texts is worth
  judged(batch, refLogprobs) {
    const rows = rowsOf(batch), ids = rows.map(b => idsOf(batch, b)), texts = ids.map(row => this.judge.text(row))
    const grammatical = rows.map(b => this.judge.grammatical(texts[b], ids[b].includes(END)))
    const scores = Float64Array.from(ids, row => this.judge.score(row))
    const kl = batch.logprobs.reduce((a, x, i) => a + x - refLogprobs[i], 0) / rows.length
    const figures = { human_score: mean(texts.map(text => this.judge.humanScore(text))), reward_model_score: mean(scores),
      grammatical: mean(grammatical.map(Number)), distinct_2: distinct2(texts), kl }
    return { texts, grammatical, scores, figures }
  }

  // log π_ref of the tokens that the policy sampled
  refLogprobs(batch, temperature) { return inRows(read(this.reference, batch, rowsOf(batch), temperature).logprobs, batch) }

  // write, score, compare, improve: the body of `train`
  iterate() {
    const s = this.settings, batch = sample(this.policy, this.generator, s.batch_size, s.temperature)
    batch.refLogprobs = this.refLogprobs(batch, s.temperature)
    const judged = this.judged(batch, batch.refLogprobs)
    Object.assign(batch, this.objective.compare(batch, judged.scores, s))
    const updates = [], size = Math.ceil(s.batch_size / s.minibatches)
    for (let epoch = 0; epoch < s.epochs; epoch++) {
      const order = this.generator.permutation(s.batch_size)
      for (let at = 0; at < order.length; at += size) updates.push(this.update(batch, order.slice(at, at + size)))
    }
    this.iteration++
    return { iteration: this.iteration, batch, updates, ...judged }
  }

  // one step of Adam on the loss of a minibatch: `update`
  update(batch, rows) {
    const s = this.settings, now = read(this.policy, batch, rows, s.temperature), loss = this.objective.gradient(now, batch, rows, s)
    const gradient = new Float64Array(this.policy.weights.length), { dLogits, dValues } = lossToLogits(now, loss, this.policy.vocab, s.temperature)
    this.policy.backward(now.pass, dLogits, dValues, gradient)
    this.optimizer.step(this.policy.weights, gradient, s.lr)
    return { loss: loss.loss, policy_loss: loss.policy, value_loss: loss.value, entropy: loss.entropy, clip_fraction: loss.held,
      gradient_norm: Math.sqrt(gradient.reduce((a, g) => a + g * g, 0)) }
  }

  // human_score, reward_model_score, grammatical, distinct_2 and kl on fresh responses: `evaluate`
  evaluate(n = 512, seed = 12345) {
    const batch = sample(this.policy, new Splitmix32(seed), n, 1), judged = this.judged(batch, this.refLogprobs(batch, 1))
    return { figures: judged.figures, texts: judged.texts, judged: { ...judged, batch } }
  }

  // probabilities of the next word after these ids
  next(policy, ids) {
    const context = new Int32Array(CONTEXT)
    contextOf(ids, 0, ids.length, context, 0)
    return logSoftmax(policy.forward(context).logits, policy.vocab, this.settings.temperature).map(Math.exp)
  }

  // the first responses of an iteration, token by token, with the ratio after the update
  shown({ batch, texts, grammatical }, n = 8) {
    const rows = rowsOf(batch).slice(0, n), few = { ids: batch.ids.subarray(0, n * T), lengths: batch.lengths.slice(0, n) }
    const after = inRows(read(this.policy, few, rows, this.settings.temperature).logprobs, few)
    return rows.map(b => ({ text: texts[b], grammatical: grammatical[b], score: this.judge.score(idsOf(batch, b)), human: this.judge.humanScore(texts[b]),
      tokens: idsOf(batch, b).map((id, t) => {
        const i = b * T + t
        return { word: this.judge.words[id], advantage: batch.advantages[i], ratio: Math.exp(after[i] - batch.logprobs[i]), value: batch.values[i],
          kl: batch.logprobs[i] - batch.refLogprobs[i], reward: batch.rewards[i], probability: Math.exp(batch.logprobs[i]), after: Math.exp(after[i]) }
      }) }))
  }
}

// The model that every run begins with: float16 in base64, as `write_start` wrote it.
export function readPolicy(start) {
  const V = start.words.length, H = 64, E = 16
  const shapes = { "embedding.weight": [V, E], "hidden.weight": [H, CONTEXT * E], "hidden.bias": [H], "head.weight": [V, H], "head.bias": [V],
    "value.weight": [1, H], "value.bias": [1] }
  const all = Object.keys(shapes).flatMap(name => {
    const bytes = Uint8Array.from(atob(start.policy[name]), c => c.charCodeAt(0))
    return Array.from(new Uint16Array(bytes.buffer), half)
  })
  return new Policy(shapes, Float64Array.from(all))
}

// a number in half precision: sign, five bits of exponent, ten of fraction
function half(bits) {
  const exponent = bits >> 10 & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction / 1024 * 2 ** -14)
}
