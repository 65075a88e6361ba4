// m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², θ ← θ − η·m̂/(√v̂ + ϵ): torch.optim.Adam, Kingma & Ba (2015)
export class Adam {
  constructor(n) {
    this.m = new Float64Array(n)
    this.v = new Float64Array(n)
    this.steps = 0
  }

  step(weights, gradient, lr, beta1 = .9, beta2 = .999, eps = 1e-8) {
    this.steps++
    const { m, v } = this, rate = lr / (1 - beta1 ** this.steps), root = Math.sqrt(1 - beta2 ** this.steps)
    for (let i = 0; i < weights.length; i++) {
      const g = gradient[i]
      m[i] += (g - m[i]) * (1 - beta1)
      v[i] = v[i] * beta2 + (1 - beta2) * g * g
      weights[i] -= rate * m[i] / (Math.sqrt(v[i]) / root + eps)
    }
  }
}
