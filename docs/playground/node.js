// The playground without a page: Node reads a job from a file and trains, in JavaScript alone or with a loss in Python.
//   node node.js JOB.json; JOB: {start, files, pyodide: a folder, runs: [{settings, iterations, texts: null or by part}]}; a line of JSON per run
import { Judge } from "./grammar.js"
import { OWN_OBJECTIVE } from "./losses.js"
import { Trainer, readPolicy } from "./loop.js"
import { DEFAULTS } from "./settings.js"
import { PythonLoss, openPage } from "./python.js"

async function main() {
  const { start, files, pyodide, runs } = JSON.parse(require("fs").readFileSync(process.argv[2], "utf-8"))
  const reference = readPolicy(start), judge = new Judge(start)
  const python = openPage(await require(`${pyodide}/pyodide.js`).loadPyodide({ indexURL: pyodide }), files)
  for (const run of runs) console.log(JSON.stringify(trained(run, reference, judge, python)))
}

function trained({ settings, iterations, texts }, reference, judge, python) {
  const began = performance.now()
  try {
    const objective = texts ? new PythonLoss(python, texts) : OWN_OBJECTIVE
    const loaded = performance.now(), trainer = new Trainer(reference, judge, { ...DEFAULTS, ...settings }, objective), losses = []
    for (let i = 0; i < iterations; i++) losses.push(...trainer.iterate().updates.map(u => u.loss))
    const seconds = { load: (loaded - began) / 1000, train: (performance.now() - loaded) / 1000 }
    return { losses, weights: Array.from(trainer.policy.weights), figures: trainer.evaluate().figures, added: objective.added, seconds }
  } catch (error) {
    if (!("line" in error)) throw error
    return { mistake: { part: error.part, line: error.line, words: error.message } }
  }
}

main().catch(error => { console.error(error); process.exit(1) })
