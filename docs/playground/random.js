// Random numbers that Python has too: `Splitmix32` of the guide *The playground*.

// xₙ = mix(seed + n·0x9E3779B9)/2³², n = 1, 2, …
export class Splitmix32 {
  constructor(seed) { this.state = seed >>> 0 }

  next() {
    let x = this.state = (this.state + 0x9e3779b9) >>> 0
    x = Math.imul(x ^ x >>> 16, 0x21f0aaad) >>> 0
    x = Math.imul(x ^ x >>> 15, 0x735a2d97) >>> 0
    return ((x ^ x >>> 15) >>> 0) / 2 ** 32
  }

  uniform(n) { return Float64Array.from({ length: n }, () => this.next()) }

  // 0 … n − 1 in random order: the shuffle of Fisher and Yates, from the end
  permutation(n) {
    const order = Array.from({ length: n }, (_, i) => i)
    for (let i = n - 1; i > 0; i--) {
      const j = Math.floor(this.next() * (i + 1))
      ;[order[i], order[j]] = [order[j], order[i]]
    }
    return order
  }
}
