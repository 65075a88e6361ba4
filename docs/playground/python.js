// The loss in Python: docs/page_loss.py on the page's tensors, run by Pyodide. It gives what `compare` and `gradient` of losses.js give.
import { T } from "./policy.js"

// an error of the reader's text: in which part of the editor, in which line
export class Mistake extends Error {
  constructor({ part, line, words }) {
    super(words)
    Object.assign(this, { part, line })
  }
}

// Pyodide in a worker; `files` are its own, and page_files.json with what Python finds on a page
export async function startPython(files) {
  const text = name => new TextDecoder().decode(files[name])
  self.fetch = async url => new Response(files[String(url).split("/").pop()], { headers: { "content-type": "application/wasm" } })
  ;(0, eval)(text("pyodide.asm.js"))
  ;(0, eval)(text("pyodide.js"))
  return openPage(await self.loadPyodide({ indexURL: "https://here.invalid/" }), JSON.parse(text("page_files.json")))
}

// the module page_loss of a Python that has just begun
export function openPage(python, files) {
  for (const [path, source] of Object.entries(files)) {
    const place = `/page/${path}`
    python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")))
    python.FS.writeFile(place, source)
  }
  python.runPython("import sys; sys.path.insert(0, '/page'); import page_tensors; page_tensors.install()")
  return python.pyimport("page_loss")
}

const numbersOf = list => Float64Array.from(list)

export class PythonLoss {
  // texts: what the reader has edited, by part
  constructor(module, texts) {
    this.module = module
    this.added = this.ask(module.new_loss, texts).added
  }

  // call Python with JSON, and read JSON: numbers keep all their digits
  ask(method, ...given) {
    const said = JSON.parse(method(...given.map(x => JSON.stringify(x))))
    if (said.mistake) throw new Mistake(said.mistake)
    return said
  }

  compare(batch, scores, settings) {
    const real = numbers => batch.lengths.flatMap((n, b) => Array.from(numbers.subarray(b * T, b * T + n)))
    const made = this.ask(this.module.prepare, settings, batch.lengths, Array.from(scores), real(batch.logprobs), real(batch.refLogprobs), real(batch.values))
    const inRows = list => {
      const out = new Float64Array(batch.logprobs.length)
      let k = 0
      batch.lengths.forEach((n, b) => { for (let t = 0; t < n; t++) out[b * T + t] = list[k++] })
      return out
    }
    return { rewards: inRows(made.rewards), advantages: inRows(made.advantages), returns: made.returns ? inRows(made.returns) : null }
  }

  gradient(now, batch, rows) {
    const [logprobs, values, entropies] = [now.logprobs, now.values, now.entropies].map(x => Array.from(x))
    const { loss, parts, gradients } = this.ask(this.module.gradient, rows, logprobs, values, entropies)
    const [dLogprobs, dValues, dEntropy] = gradients.map(numbersOf)
    return { loss, policy: parts.policy_loss, value: parts.value_loss ?? 0, entropy: parts.entropy, held: parts.clip_fraction, dLogprobs, dValues, dEntropy }
  }
}
