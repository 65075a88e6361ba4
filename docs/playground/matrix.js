// Matrix products on rows of Float64Arrays. Several sums run side by side, so that a number that was loaded is used several times.
// By hand: in float64 an iteration costs what it costs PyTorch on one core, and a library (jax-js 0.1.25: 570 KB) is larger than this whole page.

// C = A·Bᵀ + b: A (n×k), B (m×k), b (m) or null, C (n×m)
export function timesTransposed(A, B, b, C, n, m, k) {
  for (let j = 0; j < m; j += 4) {
    const wide = Math.min(4, m - j)
    const p = j * k, q = wide > 1 ? p + k : p, r = wide > 2 ? p + 2 * k : p, s = wide > 3 ? p + 3 * k : p
    for (let i = 0; i < n; i += 2) {
      const two = i + 1 < n, u = i * k, v = two ? u + k : u
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, c0 = 0, c1 = 0, c2 = 0, c3 = 0
      for (let l = 0; l < k; l++) {
        const x = A[u + l], y = A[v + l], e = B[p + l], f = B[q + l], g = B[r + l], h = B[s + l]
        a0 += x * e; a1 += x * f; a2 += x * g; a3 += x * h
        c0 += y * e; c1 += y * f; c2 += y * g; c3 += y * h
      }
      let o = i * m + j
      C[o] = a0
      if (wide > 1) C[o + 1] = a1
      if (wide > 2) C[o + 2] = a2
      if (wide > 3) C[o + 3] = a3
      if (!two) continue
      o += m
      C[o] = c0
      if (wide > 1) C[o + 1] = c1
      if (wide > 2) C[o + 2] = c2
      if (wide > 3) C[o + 3] = c3
    }
  }
  if (b) for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) C[i * m + j] += b[j]
}

// C += A·B with A[r, q] at A[r·down + q·right]: A (rows×inner), or its transpose as it lies in memory; B (inner×k), C (rows×k)
export function addProduct(C, A, down, right, B, rows, inner, k) {
  const whole = inner - inner % 4
  for (let r = 0; r < rows; r += 2) {
    const two = r + 1 < rows, c = r * k, d = two ? c + k : c
    for (let q = 0; q < whole; q += 4) {
      const at = r * down + q * right, next = two ? at + down : at
      const a0 = A[at], a1 = A[at + right], a2 = A[at + 2 * right], a3 = A[at + 3 * right]
      const e0 = A[next], e1 = A[next + right], e2 = A[next + 2 * right], e3 = A[next + 3 * right]
      const b0 = q * k, b1 = b0 + k, b2 = b1 + k, b3 = b2 + k
      for (let l = 0; l < k; l++) {
        const x = B[b0 + l], y = B[b1 + l], z = B[b2 + l], w = B[b3 + l]
        C[c + l] += a0 * x + a1 * y + a2 * z + a3 * w
        if (two) C[d + l] += e0 * x + e1 * y + e2 * z + e3 * w
      }
    }
    for (let q = whole; q < inner; q++) for (let l = 0; l < k; l++) {
      C[c + l] += A[r * down + q * right] * B[q * k + l]
      if (two) C[d + l] += A[(r + 1) * down + q * right] * B[q * k + l]
    }
  }
}
