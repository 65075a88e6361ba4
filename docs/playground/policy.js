// The policy and its gradient: `FeedForwardLM` of the guide *The playground*. All weights lie in one array, so that Adam is one loop.
import { addProduct, timesTransposed } from "./matrix.js"

export const END = 0, CONTEXT = 5, T = 16 // the token that ends a response; words read; tokens written at most

export class Policy {
  // shapes by name, as in `state_dict()`; every array is a view into `weights`
  constructor(shapes, weights) {
    this.shapes = shapes
    this.weights = weights
    this.views = Policy.cut(shapes, weights)
    ;[this.vocab, this.width] = shapes["embedding.weight"]
    this.hidden = shapes["head.weight"][1]
  }

  static cut(shapes, all) {
    let at = 0
    return Object.fromEntries(Object.entries(shapes).map(([name, shape]) => {
      const n = shape.reduce((a, b) => a * b)
      return [name, all.subarray(at, at += n)]
    }))
  }

  copy() { return new Policy(this.shapes, this.weights.slice()) }

  // h = tanh(W₁[e₁…e₅] + b₁), z = W₂h + b₂, V = w·h + b, for n contexts of five words
  forward(contexts) {
    const { vocab: V, width: E, hidden: H, views: w } = this, n = contexts.length / CONTEXT, X = CONTEXT * E
    const x = new Float64Array(n * X), h = new Float64Array(n * H), logits = new Float64Array(n * V), values = new Float64Array(n)
    for (let i = 0; i < contexts.length; i++) for (let e = 0; e < E; e++) x[i * E + e] = w["embedding.weight"][contexts[i] * E + e]
    timesTransposed(x, w["hidden.weight"], w["hidden.bias"], h, n, H, X)
    for (let i = 0; i < h.length; i++) h[i] = Math.tanh(h[i])
    timesTransposed(h, w["head.weight"], w["head.bias"], logits, n, V, H)
    timesTransposed(h, w["value.weight"], w["value.bias"], values, n, 1, H)
    return { contexts, x, h, logits, values }
  }

  // from ∂L/∂z and ∂L/∂V to ∂L/∂θ, added to `gradient` (one array, cut as the weights are)
  backward({ contexts, x, h }, dLogits, dValues, gradient) {
    const { vocab: V, width: E, hidden: H, views: w } = this, n = dValues.length, X = CONTEXT * E
    const g = Policy.cut(this.shapes, gradient), dh = new Float64Array(n * H), dx = new Float64Array(n * X)
    addProduct(g["head.weight"], dLogits, 1, V, h, V, n, H) // ∂W₂ = ∂zᵀ·h
    for (let i = 0; i < n; i++) for (let v = 0; v < V; v++) g["head.bias"][v] += dLogits[i * V + v]
    addProduct(g["value.weight"], dValues, 1, 1, h, 1, n, H)
    for (let i = 0; i < n; i++) g["value.bias"][0] += dValues[i]
    addProduct(dh, dLogits, V, 1, w["head.weight"], n, V, H) // ∂h = ∂z·W₂ + ∂V·w
    for (let i = 0; i < n; i++) for (let k = 0; k < H; k++) {
      const t = i * H + k
      dh[t] = (dh[t] + dValues[i] * w["value.weight"][k]) * (1 - h[t] * h[t]) // tanh' = 1 − tanh²
      g["hidden.bias"][k] += dh[t]
    }
    addProduct(g["hidden.weight"], dh, 1, H, x, H, n, X) // ∂W₁ = ∂aᵀ·x
    addProduct(dx, dh, H, 1, w["hidden.weight"], n, H, X)
    for (let i = 0; i < contexts.length; i++) for (let e = 0; e < E; e++) g["embedding.weight"][contexts[i] * E + e] += dx[i * E + e]
  }
}

// The five words before each token of these rows of ids, <end> where there is no word yet: `contexts`.
export function contextOf(ids, start, t, into, at) {
  for (let c = 0; c < CONTEXT; c++) {
    const before = t - CONTEXT + c
    into[at * CONTEXT + c] = before < 0 ? END : ids[start + before]
  }
}

// Many tokens are predicted from the same five words: each different context once, and for every token the number of its context.
export function distinctContexts(contexts) {
  const seen = new Map(), first = [], state = new Int32Array(contexts.length / CONTEXT)
  for (let k = 0; k < state.length; k++) {
    let key = 0
    for (let c = 0; c < CONTEXT; c++) key = key * 1000 + contexts[k * CONTEXT + c]
    if (!seen.has(key)) { seen.set(key, first.length); first.push(k) }
    state[k] = seen.get(key)
  }
  const distinct = new Int32Array(first.length * CONTEXT)
  first.forEach((k, i) => distinct.set(contexts.subarray(k * CONTEXT, k * CONTEXT + CONTEXT), i * CONTEXT))
  return { distinct, state }
}
