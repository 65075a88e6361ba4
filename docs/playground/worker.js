// The trainer in a thread of its own: each message {id, ask, …} is answered by {id, …}.
import { Judge } from "./grammar.js"
import { OWN_OBJECTIVE } from "./losses.js"
import { Trainer, readPolicy } from "./loop.js"
import { T } from "./policy.js"
import { PythonLoss, startPython } from "./python.js"

let reference, judge, trainer, python, objective = OWN_OBJECTIVE, spent = 0

const ANSWERS = {
  // the data that every run begins with
  load({ start }) {
    reference = readPolicy(start)
    judge = new Judge(start)
    return {}
  },
  reset({ settings }) {
    trainer = new Trainer(reference, judge, { ...settings }, objective)
    spent = 0
    return {}
  },
  // Python starts, once
  async python({ files }) {
    python ??= await startPython(files)
    return {}
  },
  // what the next reset trains with: the reader's texts in Python, or null: the loss in JavaScript
  objective({ texts }) {
    objective = texts ? new PythonLoss(python, texts) : OWN_OBJECTIVE
    return { added: objective.added ?? {} }
  },
  settings({ settings }) {
    if (trainer) trainer.settings = { ...settings }
    return {}
  },
  iterate() {
    const began = performance.now(), made = trainer.iterate()
    spent += performance.now() - began
    const updates = made.updates, last = updates[updates.length - 1]
    return { iteration: made.iteration, ...made.figures, entropy: updates[0].entropy, loss: last.loss, clip_fraction: last.clip_fraction,
      gradient_norm: last.gradient_norm, iterations_per_second: 1000 * trainer.iteration / spent, responses: trainer.shown(made), words: wordCounts(made.batch) }
  },
  evaluate({ n }) {
    const { figures, texts } = trainer.evaluate(n)
    return { figures, texts }
  },
  // fresh responses of the policy as it is, before anything is learnt from them
  peek() {
    const { figures, texts, judged } = trainer.evaluate(256)
    return { figures, texts: texts.slice(0, 8), grammatical: judged.grammatical.slice(0, 8), words: wordCounts(judged.batch) }
  },
  next({ ids }) { return { before: trainer.next(reference, ids), after: trainer.next(trainer.policy, ids) } },
  // everything that a test compares with Python
  trace({ settings, iterations }) {
    const own = new Trainer(reference, judge, settings), made = []
    for (let i = 0; i < iterations; i++) {
      const { batch, updates } = own.iterate()
      const rows = x => batch.lengths.map((n, b) => Array.from(x.subarray(b * T, b * T + n)))
      made.push({ ids: rows(batch.ids), logprobs: rows(batch.logprobs), ref_logprobs: rows(batch.refLogprobs), values: rows(batch.values), rewards: rows(batch.rewards),
        advantages: rows(batch.advantages), losses: updates.map(u => u.loss), gradient_norms: updates.map(u => u.gradient_norm) })
    }
    return { iterations: made, weights: Array.from(own.policy.weights), figures: own.evaluate().figures }
  }
}

// uses of each word per response
function wordCounts({ ids, lengths }) {
  const counts = new Float64Array(reference.vocab)
  lengths.forEach((n, b) => { for (let t = 0; t < n; t++) counts[ids[b * T + t]] += 1 / lengths.length })
  return counts
}

self.onmessage = async ({ data }) => {
  try { self.postMessage({ id: data.id, answer: await ANSWERS[data.ask](data) }) } catch (error) {
    const mistake = "line" in error && "part" in error ? { part: error.part, line: error.line, message: error.message } : undefined
    self.postMessage({ id: data.id, error: String(error.stack), mistake })
  }
}
