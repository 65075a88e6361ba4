// Log-probabilities, advantages and the loss with its gradient, each by the name that it has in instruct_goose.objective.
// A batch of B responses is rows of T = 16 places; `lengths` says how many of a row are real tokens.
import { T } from "./policy.js"

// log π(·|s) = z/τ − log Σ exp(z/τ), in place, row by row: objective.logprobs.log_softmax
export function logSoftmax(logits, vocab, temperature) {
  for (let at = 0; at < logits.length; at += vocab) {
    let top = -Infinity, sum = 0
    for (let v = at; v < at + vocab; v++) { logits[v] /= temperature; if (logits[v] > top) top = logits[v] }
    for (let v = at; v < at + vocab; v++) sum += Math.exp(logits[v] - top)
    const log = top + Math.log(sum)
    for (let v = at; v < at + vocab; v++) logits[v] -= log
  }
  return logits
}

// S = −Σ p·log p of one row of log-probabilities, and p beside it: objective.logprobs.entropy
export function entropy(logprobs, at, vocab, probs) {
  let S = 0
  for (let v = 0; v < vocab; v++) {
    const p = probs[at + v] = Math.exp(logprobs[at + v])
    S -= p * logprobs[at + v]
  }
  return S
}

// rₜ = −β·(log π − log π_ref) + score·1[t is the last token]: objective.kl.kl_in_reward
export function klInReward(scores, logprobs, refLogprobs, lengths, beta) {
  const rewards = new Float64Array(logprobs.length)
  lengths.forEach((n, b) => {
    for (let t = 0; t < n; t++) rewards[b * T + t] = -beta * (logprobs[b * T + t] - refLogprobs[b * T + t])
    rewards[b * T + n - 1] += scores[b]
  })
  return rewards
}

// Gₜ = rₜ + γ·Gₜ₊₁: objective.advantages.discounted_returns
export function discountedReturns(rewards, lengths, gamma = 1) {
  const returns = new Float64Array(rewards.length)
  lengths.forEach((n, b) => {
    for (let t = n - 1, later = 0; t >= 0; t--) later = returns[b * T + t] = rewards[b * T + t] + gamma * later
  })
  return returns
}

// δₜ = rₜ + Vₜ₊₁ − Vₜ, Âₜ = δₜ + λ·Âₜ₊₁, R̂ₜ = Âₜ + Vₜ, γ = 1: objective.advantages.gae
export function gae(rewards, values, lengths, lam) {
  const errors = new Float64Array(rewards.length)
  lengths.forEach((n, b) => {
    for (let t = 0; t < n; t++) {
      const i = b * T + t, next = t + 1 < n ? values[i + 1] : 0
      errors[i] = rewards[i] + next - values[i]
    }
  })
  const advantages = discountedReturns(errors, lengths, lam)
  return { advantages, returns: advantages.map((a, i) => a + values[i]) }
}

// (x − x̄)/(std + 10⁻⁴) in each group (GRPO), or x − mean of the others (RLOO): objective.advantages.group_advantages
export function groupAdvantages(scores, size, how) {
  const out = new Float64Array(scores.length)
  for (let at = 0; at < scores.length; at += size) {
    const group = scores.subarray(at, at + size)
    if (group.every(x => x === group[0])) continue
    const mean = group.reduce((a, x) => a + x) / size
    const std = Math.sqrt(group.reduce((a, x) => a + (x - mean) ** 2, 0) / (size - 1)) + 1e-4
    group.forEach((x, i) => { out[at + i] = how === "mean_std" ? (x - mean) / std : (x - mean) * size / (size - 1) })
  }
  return out
}

// The total reward of each response, compared in its group, at each of its tokens: `compared` of AdvantageInputs
export function comparedInGroups(rewards, lengths, size, how) {
  const totals = Float64Array.from(lengths, (n, b) => rewards.subarray(b * T, b * T + n).reduce((a, x) => a + x, 0))
  const out = new Float64Array(rewards.length)
  groupAdvantages(totals, size, how).forEach((a, b) => out.fill(a, b * T, b * T + lengths[b]))
  return out
}

// (x − x̄)/√(var + 10⁻⁸) over the real tokens, var unbiased: objective.masks.whiten
export function whiten(x, lengths) {
  const out = new Float64Array(x.length), real = []
  lengths.forEach((n, b) => { for (let t = 0; t < n; t++) real.push(b * T + t) })
  const mean = real.reduce((a, i) => a + x[i], 0) / real.length
  const variance = real.reduce((a, i) => a + (x[i] - mean) ** 2, 0) / (real.length - 1)
  if (real.some(i => x[i] !== x[real[0]])) for (const i of real) out[i] = (x[i] - mean) / Math.sqrt(variance + 1e-8)
  return out
}

// advantage, mean over tokens or over responses, ratio of a token or of the response, clip: rows of objective.group.PRESETS
export const ALGORITHMS = {
  ppo: { advantage: "gae", whiten: true, aggregation: "token_mean", level: "token", clipped: true },
  grpo: { advantage: "mean_std", whiten: false, aggregation: "sequence_mean", level: "token", clipped: true },
  rloo: { advantage: "leave_one_out", whiten: false, aggregation: "sequence_mean", level: "product", clipped: true },
  reinforce: { advantage: "return", whiten: true, aggregation: "token_mean", level: "token", clipped: false }
}

// objective.advantages.estimate_advantages, and whiten where the algorithm does
export function estimateAdvantages(algorithm, rewards, values, lengths, settings) {
  const a = ALGORITHMS[algorithm]
  let made
  if (a.advantage === "gae") made = gae(rewards, values, lengths, settings.lam)
  else if (a.advantage === "return") made = { advantages: discountedReturns(rewards, lengths), returns: null }
  else made = { advantages: comparedInGroups(rewards, lengths, settings.group_size, a.advantage), returns: null }
  if (a.whiten) made.advantages = whiten(made.advantages, lengths)
  return made
}

// L = mean of −min(ρÂ, clip(ρ, 1−ε, 1+ε)Â) + c₁·½(V − R̂)² − c₂·S + β·k₃, with the gradient by log π, V and S of each token:
// objective.ppo.ppo_loss and objective.kl.kl_in_loss. `now` has one number per real token of these rows, in order.
export function ppoLoss(now, batch, rows, s) {
  const a = ALGORITHMS[s.algorithm], count = rows.reduce((n, b) => n + batch.lengths[b], 0)
  const dLogprobs = new Float64Array(count), dValues = new Float64Array(count), dEntropy = new Float64Array(count)
  const sums = { policy: 0, value: 0, entropy: 0, kl: 0, held: 0 }
  let k = 0
  for (const b of rows) {
    const n = batch.lengths[b], weight = a.aggregation === "token_mean" ? 1 / count : 1 / (rows.length * n) // objective.masks.aggregate
    const logRatio = Float64Array.from({ length: n }, (_, t) => now.logprobs[k + t] - batch.logprobs[b * T + t])
    const whole = logRatio.reduce((x, y) => x + y, 0)
    for (let t = 0; t < n; t++, k++) {
      const i = b * T + t, A = batch.advantages[i]
      // ρ = π/π_old of the token, or of the whole response: objective.policy_loss.probability_ratio
      const ell = a.level === "product" ? whole : logRatio[t], cut = Math.min(20, Math.max(-20, ell)), ratio = Math.exp(cut)
      const held = a.clipped && (ratio > 1 + s.clip && A > 0 || ratio < 1 - s.clip && A < 0) // objective.policy_loss.clip_active
      const bounded = Math.min(1 + s.clip, Math.max(1 - s.clip, ratio))
      sums.policy -= weight * (a.clipped ? Math.min(ratio * A, bounded * A) : ratio * A)
      sums.held += held / count
      const pull = held || cut !== ell ? 0 : -weight * ratio * A // ∂L/∂log π, where the clip does not hold it
      if (a.level === "product") for (let u = 0; u < n; u++) dLogprobs[k - t + u] += pull
      else dLogprobs[k] += pull
      if (batch.returns) { // ½(V − R̂)²: objective.value_loss.value_loss
        const error = now.values[k] - batch.returns[i]
        sums.value += weight * error * error / 2
        dValues[k] = s.vf_coef * weight * error
      }
      sums.entropy += weight * now.entropies[k]
      dEntropy[k] = -s.ent_coef * weight
      if (s.kl_placement === "loss") { // k₃ = e^(−ℓ) − 1 + ℓ, ℓ = log π − log π_ref: objective.kl.k3
        const ref = now.logprobs[k] - batch.refLogprobs[i], low = Math.max(-10, ref)
        sums.kl += weight * s.beta * (Math.expm1(-low) + low)
        if (ref >= -10) dLogprobs[k] += weight * s.beta * (1 - Math.exp(-low))
      }
    }
  }
  const loss = sums.policy + (batch.returns ? s.vf_coef * sums.value : 0) - s.ent_coef * sums.entropy + sums.kl
  return { loss, ...sums, dLogprobs, dValues, dEntropy }
}

// rewards, advantages and returns of a batch: `rewards_and_advantages` of the guide *The playground*
function compare(batch, scores, s) {
  const rewards = klInReward(scores, batch.logprobs, batch.refLogprobs, batch.lengths, s.kl_placement === "reward" ? s.beta : 0)
  return { rewards, ...estimateAdvantages(s.algorithm, rewards, batch.values, batch.lengths, s) }
}

// what a trainer asks for; python.js has the same in Python
export const OWN_OBJECTIVE = { compare, gradient: ppoLoss }

// from the tokens to the logits: ∂L/∂z_v = Σ over the tokens of a state [g·(1[v = a] − p_v) − s·p_v·(log p_v + S)]/τ, g = ∂L/∂log π, s = ∂L/∂S
export function lossToLogits(now, { dLogprobs, dEntropy, dValues }, vocab, temperature) {
  const n = now.table.length / vocab, g = new Float64Array(n), s = new Float64Array(n), ofState = new Float64Array(n), dLogits = new Float64Array(now.table.length)
  now.state.forEach((i, k) => {
    g[i] += dLogprobs[k]
    s[i] += dEntropy[k]
    ofState[i] += dValues[k]
    dLogits[i * vocab + now.tokens[k]] += dLogprobs[k] / temperature
  })
  for (let i = 0; i < n; i++) for (let v = i * vocab; v < (i + 1) * vocab; v++) {
    dLogits[v] -= now.probs[v] * (s[i] ? g[i] + s[i] * (now.table[v] + now.entropy[i]) : g[i]) / temperature
  }
  return { dLogits, dValues: ofState }
}
