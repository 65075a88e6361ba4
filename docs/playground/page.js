// The page: controls, curves and texts. It asks the worker for one iteration after the other, and draws what comes back.
import { Chart, element } from "./charts.js"
import { Editor } from "./editor.js"
import { EXPERIMENTS } from "./experiments.js"
import { CHOICES, DEFAULTS, PER_ALGORITHM, SLIDERS, fromAddress, toAddress } from "./settings.js"

const at = id => document.getElementById(`pg-${id}`)
const still = matchMedia("(prefers-reduced-motion: reduce)")
const two = x => (x < 0 ? "−" : "") + Math.abs(x).toFixed(2), share = x => `${Math.round(100 * x)} %`

// --- the worker: ask(what, data) is a promise of its answer -----------------------------------------------------------
const waiting = new Map()
let asked = 0, worker
function startWorker() {
  worker = new Worker(URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" })))
  worker.onmessage = ({ data: { id, answer, error, mistake } }) => {
    const { answered, failed } = waiting.get(id)
    waiting.delete(id)
    error ? failed(Object.assign(new Error(error), { mistake })) : answered(answer)
  }
  return ask("load", { start: START })
}
function ask(what, more = {}) {
  return new Promise((answered, failed) => {
    waiting.set(++asked, { answered, failed })
    worker.postMessage({ id: asked, ask: what, ...more })
  })
}
// a worker that does not come back is left behind, with what it was asked
function startWorkerAgain(words) {
  worker.terminate()
  for (const { failed } of waiting.values()) failed(Object.assign(new Error(words), { mistake: { part: null, line: null, message: words } }))
  waiting.clear()
  return startWorker()
}

// --- state ------------------------------------------------------------------------------------------------------------
const address = fromAddress(location.search), MOST = 300
let settings = address.settings, playing = null, until = MOST, first = null, shown = null, drawn = 0
let run = { settings, rows: [], marks: [], words: [] }, earlier = []
const seen = new Set() // labels of runs of experiments that were watched to their end

// --- settings ---------------------------------------------------------------------------------------------------------
const sliders = SLIDERS.map(({ name, label, values, show, help, uses, restarts }) => {
  const input = element("input", { type: "range", id: `pg-${name}`, min: 0, max: values.length - 1, step: 1, "aria-describedby": `pg-${name}-help` })
  const value = element("output", { for: `pg-${name}` })
  const node = element("div", { class: "pg-slider" }, element("label", { for: `pg-${name}` }, `${label} `, value), input, element("small", { id: `pg-${name}-help`, text: help }))
  const nearest = x => values.reduce((best, v, i) => Math.abs(v - x) < Math.abs(values[best] - x) ? i : best, 0)
  input.addEventListener("input", () => change({ [name]: values[input.value] }, restarts))
  const update = () => {
    input.value = nearest(settings[name])
    value.textContent = show(settings[name])
    input.setAttribute("aria-valuetext", show(settings[name]))
    input.disabled = Boolean(uses && !uses.includes(settings.algorithm))
    node.classList.toggle("pg-unused", input.disabled)
  }
  return { name, node, update }
})
const placement = element("select", { id: "pg-kl_placement" })
function choices(select, options) { for (const [value, text] of Object.entries(options)) select.append(element("option", { value, text })) }

function change(changed, restart = false) {
  settings = { ...settings, ...changed }
  if (settings.batch_size % settings.group_size) settings.group_size = Math.min(settings.group_size, settings.batch_size)
  showSettings()
  if (restart) return reset()
  if (run.rows.length) run.marks.push(run.rows.length)
  else run.settings = settings
  return ask("settings", { settings })
}

function showSettings() {
  for (const s of sliders) s.update()
  at("algorithm").value = settings.algorithm
  placement.value = settings.kl_placement
  const held = [toAddress(settings), address.embed ? "embed=1" : "", address.experiment ? `experiment=${address.experiment}` : "", address.loss ? `loss=${address.loss}` : ""].filter(Boolean).join("&")
  try { history.replaceState(null, "", `${location.pathname}${held ? `?${held}` : ""}${location.hash}`) } catch { /* a frame without an address */ }
}

// --- running ----------------------------------------------------------------------------------------------------------
async function reset(keep = true) {
  if (keep && run.rows.length > 1) earlier = [...earlier, run].slice(-6)
  run = { settings, rows: [], marks: [], words: [] }
  shown = null
  await ask("reset", { settings })
  const peek = await ask("peek")
  first ??= peek
  if (!run.rows.length) shown = peek.texts.map((text, i) => ({ text, grammatical: peek.grammatical[i], tokens: text.split(" ").map(word => ({ word })) }))
  draw(true)
}

async function step() {
  const mine = run, row = await inTime(ask("iterate"))
  if (mine !== run || !row) return // a reset came between
  shown = row.responses
  run.words = [...run.words, row.words].slice(-5)
  delete row.responses
  delete row.words
  run.rows.push(row)
  noteExperiments()
  draw()
}

async function play(iterations = MOST, pause = () => Number(at("speed").value)) {
  const mine = playing = {} // another play, or none, ends this one
  until = run.rows.length + iterations
  showPlaying()
  while (playing === mine && run.rows.length < until) {
    const began = performance.now()
    await step()
    const rest = pause() - (performance.now() - began)
    if (rest > 0) await new Promise(done => setTimeout(done, rest))
  }
  if (playing && playing !== mine) return
  playing = null
  showPlaying()
  draw(true)
  const last = run.rows[run.rows.length - 1]
  if (last) at("live").textContent = `Iteration ${run.rows.length}: human score ${two(last.human_score)}, reward-model score ${two(last.reward_model_score)}, KL ${two(last.kl)} nats, ${share(last.grammatical)} grammatical.`
}

// --- the loss in Python -----------------------------------------------------------------------------------------------
const SECONDS = 10
const root = `${document.documentElement.dataset.content_root ?? "./"}_static/`
const loadScript = name => new Promise((done, failed) => document.head.append(Object.assign(element("script", { src: root + name }), { onload: done, onerror: failed })))
let files, inPython = null // files: of Python, loaded once; inPython: the texts that are trained with
function bytesOf(text) { // a loop: Uint8Array.from takes a second for Python
  const letters = atob(text), bytes = new Uint8Array(letters.length)
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i)
  return bytes
}
async function unpackFile(text) {
  return new Response(new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()
}
function loadFiles() {
  return files ??= Promise.all([loadScript("python.js"), loadScript("page_files.js")])
    .then(async () => Object.fromEntries(await Promise.all(Object.entries({ ...PYTHON, "page_files.json": PAGE_FILES }).map(async ([name, text]) => [name, await unpackFile(text)]))))
}

// an answer that Python takes part in: a mistake is shown beside its line, and what takes too long is stopped; then there is no answer
async function inTime(answer) {
  const late = `Stopped after ${SECONDS} seconds: is there a loop without an end? A phone may be too slow for a loss in Python.`
  const clock = inPython ? setTimeout(async () => { await startWorkerAgain(late); await trainBuiltIn() }, 1000 * SECONDS) : null
  try { return await answer } catch (error) {
    if (!error.mistake) throw error
    playing = null
    showPlaying()
    editor.showMistake(error.mistake)
    editor.say("Training has stopped: see the editor.")
    return null
  } finally { clearTimeout(clock) }
}

const WITHOUT_PYTHON = "This build of the site has no Python for the browser, so that an edited loss cannot be trained here. Download it as a notebook."

async function trainWith(texts) {
  if (!HAS_PYTHON) {
    at("built-in").hidden = true
    return editor.say(WITHOUT_PYTHON)
  }
  editor.say(files ? "Your loss is being loaded" : "Python is loading: 7 MB, once")
  await stop()
  try { await ask("python", { files: await loadFiles() }) } catch (error) {
    files = undefined
    return editor.say(location.protocol === "file:" && !document.querySelector(".site") ? "Python could not be loaded: its files belong into the folder _static beside this page." : `Python could not be started: ${error.message ?? "this browser is too old for it"}`)
  }
  inPython = texts
  const made = await inTime(ask("objective", { texts }))
  if (!made) return
  await reset()
  const parts = Object.keys(texts), added = Object.entries(made.added).map(([setting, name]) => `${setting} “${name}”`)
  editor.say(parts.length ? `Trains with your ${parts.join(" and ")}, in Python${added.length ? `: ${added.join(", ")}` : ""}.` : "Trains with the exported loss, in Python. Nothing is edited: the numbers are those of the built-in loss.")
  await play(MOST, () => 0)
}

async function trainBuiltIn() {
  await stop()
  inPython = null
  await ask("objective", { texts: null })
  await reset()
}

async function stop() {
  playing = null
  showPlaying()
  await ask("settings", { settings }) // what was asked before has been answered by now
}

function showPlaying() { at("play").textContent = playing ? "Pause" : "Play" }

// ?iterations=60: run at once, and leave the figures in #result
async function script(iterations) {
  const before = (await ask("evaluate", { n: 512 })).figures
  await play(iterations, () => 0)
  const after = (await ask("evaluate", { n: 512 })).figures, last = run.rows[run.rows.length - 1]
  const result = document.getElementById("result")
  result.textContent = JSON.stringify({ settings: run.settings, iterations: run.rows.length, before, after, iterations_per_second: last.iterations_per_second }, null, 1)
  result.hidden = false
}

// --- curves -----------------------------------------------------------------------------------------------------------
const CHARTS = { reward_model_score: new Chart("Reward-model score", "", 0, 3, two), human_score: new Chart("Human score", "", 0, 3.5, two), kl: new Chart("KL, nats", "", 0, 8, two),
  grammatical: new Chart("Grammatical", "", 0, 1, share), distinct_2: new Chart("Different word pairs", "", 0, 1, share), entropy: new Chart("Entropy, nats", "", 0, 1.5, two) }

function draw(all = false) {
  const last = run.rows[run.rows.length - 1]
  at("iteration").textContent = `Iteration ${run.rows.length}`
  at("rate").textContent = last ? `${last.iterations_per_second.toFixed(1)} iterations/s of training` : ""
  for (const [name, chart] of Object.entries(CHARTS)) chart.draw([...earlier, run].map(r => r.rows.map(row => row[name])), run.marks)
  const now = performance.now()
  if (!all && now - drawn < (still.matches ? 1000 : 60)) return
  drawn = now
  showResponses()
  showWords()
  showNext()
}

// --- responses --------------------------------------------------------------------------------------------------------
// what a word is coloured by: its number, the number of full colour, and what the two colours mean
const COLOURS = {
  advantage: { label: "advantage", of: w => w.advantage, full: 2, key: ["worse than expected", "better than expected"] },
  ratio: { label: "ratio after the update", of: w => Math.log(w.ratio), full: .4, key: ["less likely than before", "more likely than before"] },
  clip: { label: "clip", of: w => settings.algorithm === "reinforce" ? 0 : w.ratio > 1 + settings.clip && w.advantage > 0 ? 1 : w.ratio < 1 - settings.clip && w.advantage < 0 ? -1 : 0, full: 1, key: ["held from below", "held from above"] },
  value: { label: "value", of: w => w.value, full: 3, key: ["expects less than 0", "expects more than 0"] },
  kl: { label: "KL", of: w => w.kl, full: 3, key: ["rarer than in the reference", "more frequent than in the reference"] },
  reward: { label: "per-word reward", of: w => w.reward, full: 2, key: ["pays", "is paid"] }
}
let place = [0, 0] // of the word that the Tab key reaches

function colour(x) {
  const strength = Math.min(1, Math.abs(x))
  return strength < .04 ? "transparent" : `rgb(var(${x > 0 ? "--pg-up" : "--pg-down"}) / ${(.62 * strength).toFixed(2)})`
}

function showResponses() {
  const list = at("responses"), by = COLOURS[at("colour").value], inside = list.contains(document.activeElement)
  const lines = (shown ?? []).map((response, r) => {
    const words = response.tokens.map((w, t) => {
      const end = w.word === "<end>", button = element("button", { type: "button", class: "pg-token", "data-row": r, "data-at": t, tabindex: -1, text: end ? "⏎" : w.word })
      if (end) button.setAttribute("aria-label", "end")
      if (w.ratio !== undefined) button.style.backgroundColor = colour(by.of(w) / by.full)
      return button
    })
    const line = element("div", { class: response.grammatical ? "pg-line" : "pg-line pg-broken" }, element("span", { class: "pg-text" }, ...words.flatMap(word => [word, " "])))
    if (!response.grammatical) line.append(element("span", { class: "pg-flag", text: "broken" }))
    if (response.score !== undefined) line.append(element("span", { class: "pg-score", text: two(response.score), title: "reward-model score" }))
    return line
  })
  list.replaceChildren(...lines)
  const here = list.querySelector(`[data-row="${place[0]}"][data-at="${place[1]}"]`) ?? list.querySelector("button")
  here?.setAttribute("tabindex", 0)
  if (inside) here?.focus({ preventScroll: true })
  const swatch = (x, text) => [element("i", { class: "pg-swatch", style: `background: ${colour(x)}` }), text]
  at("key").replaceChildren(...swatch(-1, by.key[0]), ...swatch(1, by.key[1]))
}

function tokenOf(button) { return shown[button.dataset.row].tokens[button.dataset.at] }

function explain(button) {
  const w = tokenOf(button)
  if (w.ratio === undefined) { at("word").textContent = `“${w.word}”: nothing has been learnt from it yet. Press Play or Step.`; return }
  const held = COLOURS.clip.of(w), push = Math.abs(w.advantage) < .005 ? "the gradient leaves it alone" : w.advantage > 0 ? "↑ the gradient raises it" : "↓ the gradient lowers it"
  at("word").replaceChildren(element("b", { text: w.word === "<end>" ? "end" : w.word }), ` probability ${(100 * w.probability).toFixed(1)} % → ${(100 * w.after).toFixed(1)} %, ${push}${held ? ", until the clip holds it" : ""} · ` +
    `advantage ${two(w.advantage)} · ratio ${two(w.ratio)} · value ${two(w.value)} · KL ${two(w.kl)} · reward ${two(w.reward)}`)
}

function moveBetweenWords(event) {
  const button = event.target.closest("button")
  const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key]
  if (!button || !move) return
  event.preventDefault()
  const row = Math.min(shown.length - 1, Math.max(0, Number(button.dataset.row) + move[0]))
  const t = Math.min(shown[row].tokens.length - 1, Math.max(0, Number(button.dataset.at) + move[1]))
  button.setAttribute("tabindex", -1)
  place = [row, t]
  const next = at("responses").querySelector(`[data-row="${row}"][data-at="${t}"]`)
  next.setAttribute("tabindex", 0)
  next.focus()
}

// --- the next word, and words that changed ----------------------------------------------------------------------------
const ids = new Map(START.words.map((word, i) => [word, i]))
let asking = false

async function showNext() {
  const words = at("prefix").value.trim().toLowerCase().split(/\s+/).filter(Boolean), unknown = words.filter(word => !ids.has(word))
  at("unknown").textContent = unknown.length ? `The model does not know “${unknown[0]}”.` : ""
  if (unknown.length || asking) return
  asking = true
  const { before, after } = await ask("next", { ids: words.map(word => ids.get(word)) })
  asking = false
  const top = START.words.map((_, i) => i).sort((a, b) => Math.max(before[b], after[b]) - Math.max(before[a], after[a])).slice(0, 8)
  const largest = Math.max(...top.map(i => Math.max(before[i], after[i])))
  bars(at("next"), ["word", "before", "now"], top.map(i => [START.words[i] === "<end>" ? "end" : START.words[i], before[i], after[i]]), largest, x => `${(100 * x).toFixed(1)} %`)
}

function showWords() {
  if (!first || !run.words.length) { at("words").replaceChildren(element("p", { class: "pg-note", text: "Nothing has changed yet." })); return }
  const now = first.words.map((_, i) => run.words.reduce((sum, words) => sum + words[i], 0) / run.words.length)
  const order = START.words.map((_, i) => i).slice(1).sort((a, b) => (now[b] - first.words[b]) - (now[a] - first.words[a]))
  const rows = [...order.slice(0, 5), ...order.slice(-5)].map(i => [START.words[i], 100 * first.words[i], 100 * now[i]])
  bars(at("words"), ["word", "before", "now"], rows, Math.max(...rows.map(r => Math.max(r[1], r[2]))), x => x.toFixed(0))
}

// a table whose numbers are bars as well
function bars(into, head, rows, largest, show) {
  const bar = (x, kind) => element("td", {}, element("span", { class: `pg-bar-of ${kind}`, style: `width: ${(100 * x / (largest || 1)).toFixed(1)}%` }), element("span", { class: "pg-number", text: show(x) }))
  into.replaceChildren(element("table", { class: "pg-bars" }, element("thead", {}, element("tr", {}, ...head.map(text => element("th", { scope: "col", text })))),
    element("tbody", {}, ...rows.map(([word, before, now]) => element("tr", {}, element("th", { scope: "row", text: word }), bar(before, "pg-before"), bar(now, "pg-after"))))))
}

// --- experiments ------------------------------------------------------------------------------------------------------
const nameOf = (experiment, r) => `${experiment.name} ${r.label}`

function noteExperiments() {
  if (run.marks.length) return
  for (const experiment of EXPERIMENTS) for (const r of experiment.runs) {
    const wanted = { ...DEFAULTS, ...r.settings, seed: run.settings.seed }
    if (run.rows.length >= r.iterations && Object.keys(wanted).every(name => wanted[name] === run.settings[name])) seen.add(nameOf(experiment, r))
  }
  showExperiments()
}

function showExperiments() {
  for (const experiment of EXPERIMENTS) {
    const card = at(`experiment-${experiment.name}`), done = experiment.runs.every(r => seen.has(nameOf(experiment, r)))
    card.querySelectorAll("button").forEach((button, i) => button.classList.toggle("pg-done", seen.has(nameOf(experiment, experiment.runs[i]))))
    const answer = card.querySelector(".pg-answer")
    if (answer.hidden && done) { answer.hidden = false; answer.textContent = experiment.answer }
  }
}

async function setUp(experiment, r) {
  await stop()
  settings = { ...DEFAULTS, ...r.settings, seed: settings.seed }
  showSettings()
  await reset()
  if (!address.embed) document.querySelector(".pg-bar").scrollIntoView({ block: "nearest", behavior: still.matches ? "auto" : "smooth" })
  await play(r.iterations)
}

function makeExperiments() {
  for (const experiment of EXPERIMENTS) {
    const buttons = experiment.runs.map(r => {
      const button = element("button", { type: "button", text: `Run: ${r.label}` })
      button.addEventListener("click", () => setUp(experiment, r))
      return button
    })
    const card = element("details", { id: `pg-experiment-${experiment.name}`, name: "pg-experiment", class: "pg-experiment" }, element("summary", { text: experiment.title }), element("p", { text: experiment.question }),
      element("p", { class: "pg-buttons" }, ...buttons), element("p", { class: "pg-answer", role: "status", hidden: "" }))
    at("experiments").append(card)
    card.open = experiment.name === (address.experiment ?? "kl")
    card.hidden = address.embed && !card.open
  }
}

// --- what prepared edits do ------------------------------------------------------------------------------------------
const editor = new Editor({ sources: SOURCES, edits: EDITS, train: trainWith, builtIn: trainBuiltIn })

function showMeasured() {
  const rows = MEASURED.rows.map(([title, says, ...figures]) => element("tr", {}, element("th", { scope: "row", text: title }), ...figures.map((text, i) => element("td", { text, "data-name": MEASURED.head[i + 1] })), element("td", { class: "pg-says", text: says })))
  at("measured").append(element("table", { class: "pg-measured" }, element("thead", {}, element("tr", {}, ...MEASURED.head.map(text => element("th", { scope: "col", text })))), element("tbody", {}, ...rows)),
    element("p", { class: "pg-note", text: MEASURED.note }))
}

// --- the page ---------------------------------------------------------------------------------------------------------
async function begin() {
  document.documentElement.classList.toggle("pg-embed", address.embed)
  document.documentElement.classList.toggle("pg-with-loss", Boolean(address.loss || address.edit))
  choices(at("algorithm"), CHOICES.algorithm)
  choices(placement, CHOICES.kl_placement)
  choices(at("colour"), Object.fromEntries(Object.entries(COLOURS).map(([name, c]) => [name, c.label])))
  document.querySelector(".pg-price").append(sliders[0].node)
  at("settings").append(...sliders.slice(1).map(s => s.node), element("div", { class: "pg-slider" }, element("label", { for: "pg-kl_placement", text: "KL penalty" }), placement,
    element("small", { text: "In the reward it reaches every earlier word, in the loss each word alone." })))
  at("curves").append(...Object.values(CHARTS).map(chart => chart.node))
  makeExperiments()
  at("play").addEventListener("click", () => playing ? stop() : play())
  at("step").addEventListener("click", async () => { await stop(); await step(); draw(true) })
  at("reset").addEventListener("click", async () => { await stop(); await reset() })
  at("forget").addEventListener("click", () => { earlier = []; draw(true) })
  at("defaults").addEventListener("click", () => change({ ...DEFAULTS, seed: settings.seed }))
  at("algorithm").addEventListener("change", event => change({ ...PER_ALGORITHM.ppo, kl_placement: "reward", beta: DEFAULTS.beta, ...PER_ALGORITHM[event.target.value], algorithm: event.target.value }))
  placement.addEventListener("change", () => change({ kl_placement: placement.value }))
  at("colour").addEventListener("change", showResponses)
  at("prefix").addEventListener("input", showNext)
  const list = at("responses")
  list.addEventListener("pointerover", event => { if (event.target.matches(".pg-token")) explain(event.target) })
  list.addEventListener("focusin", event => { if (event.target.matches(".pg-token")) { place = [Number(event.target.dataset.row), Number(event.target.dataset.at)]; explain(event.target) } })
  list.addEventListener("keydown", moveBetweenWords)
  list.addEventListener("click", event => {
    const button = event.target.closest(".pg-token")
    if (!button) return
    at("prefix").value = shown[button.dataset.row].tokens.slice(0, button.dataset.at).map(w => w.word).join(" ")
    showNext()
  })
  showSettings()
  showMeasured()
  await startWorker()
  await reset()
  await editor.begin(address)
  at("train").disabled = !HAS_PYTHON
  if (!HAS_PYTHON) editor.say(WITHOUT_PYTHON)
  if (address.iterations) await script(address.iterations)
}

window.playground = { editor, trace: (settings, iterations) => ask("trace", { settings: { ...DEFAULTS, ...settings }, iterations }), ready: begin() }
