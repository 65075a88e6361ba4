// The cells of a lesson run on its page: Python and the page's tensors in a worker. docs/page_build.py writes their places and _static/page_files.js.
(() => {
  const SECONDS = 10, root = document.documentElement.dataset.content_root || "./"
  const data = document.getElementById("page-cells")
  if (!data) return
  const make = (name, set = {}, ...inside) => { const e = Object.assign(document.createElement(name), set); e.append(...inside); return e }
  const sources = JSON.parse(data.textContent)  // [[id, source], …] of all cells that run
  const cells = {}  // by id: what stands on the page for a cell that is shown
  let files, worker, clock
  let busy  // the run that goes on: {cell: what is run, at: where the reader has asked for it}; an exercise asks for the cell that checks it

  // Runs in the worker, where this text is its whole source: what is opened from disk may start a worker from a blob alone
  const work = () => {
    let lesson, python
    const start = async (files, sources) => {
      const text = name => new TextDecoder().decode(files[name])
      self.fetch = async url => new Response(files[String(url).split("/").pop()], {headers: {"content-type": "application/wasm"}});
      (0, eval)(text("pyodide.asm.js")); (0, eval)(text("pyodide.js"))
      python = await loadPyodide({indexURL: "https://here.invalid/"})
      for (const [path, source] of Object.entries(JSON.parse(text("page_files.json")))) {
        const place = "/page/" + path
        python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")))
        python.FS.writeFile(place, source)
      }
      python.runPython("import sys; sys.path.insert(0, '/page'); import page_runner")
      return python.pyimport("page_runner").open_lesson(JSON.stringify(sources))
    }
    onmessage = async ({data: {files, sources, wanted, edited}}) => {
      try {
        lesson ??= await start(files, sources)
        lesson.run(wanted, python.toPy(edited), said => postMessage(JSON.parse(said)))
      } catch (error) { postMessage({died: String(error)}) }
    }
  }

  const bytesOf = text => {  // a loop: Uint8Array.from takes a second for Python
    const letters = atob(text), bytes = new Uint8Array(letters.length)
    for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i)
    return bytes
  }
  const unpack = async text => new Response(new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()
  const script = name => new Promise((done, failed) => document.head.append(make("script", {src: `${root}_static/${name}`, onload: done, onerror: failed})))
  const load = () => files ??= Promise.all([typeof PYTHON === "undefined" ? script("python.js") : 0, script("page_files.js")])
    .then(async () => Object.fromEntries(await Promise.all(Object.entries({...PYTHON, "page_files.json": PAGE_FILES}).map(async ([name, text]) => [name, await unpack(text)]))))

  // a run ends as done, failed or stopped: with words where it was asked for, and with a worker that is no longer of use
  const end = (stage, words, kill) => {
    clearTimeout(clock)
    if (kill) { worker?.terminate(); worker = undefined; for (const cell of Object.values(cells)) cell.ran = false }
    const {at} = busy
    busy = undefined
    at.state(stage, words)
  }
  const run = async (cell, at = cell) => {
    if (busy) end("stopped", "stopped", true)
    const turn = busy = {cell, at}
    at.state("loading", worker ? "waiting" : "Python is loading: 7 MB, once")
    let loaded
    try { loaded = await load() } catch { files = undefined }
    if (busy !== turn) return
    if (!loaded) return end("failed", "Python could not be loaded: this browser is too old for it, or files are missing in _static", true)
    const isNew = !worker
    if (isNew) {
      worker = new Worker(URL.createObjectURL(new Blob([`(${work})()`], {type: "text/javascript"})))
      worker.onerror = e => { if (busy) end("failed", "Python could not be started: " + e.message, true) }
    }
    worker.onmessage = ({data: said}) => {
      if (busy !== turn) return
      if (said.begins) {
        const seconds = cells[said.begins]?.seconds ?? SECONDS
        const words = seconds > SECONDS ? `running: this cell may take up to ${seconds} seconds` : "running"
        clearTimeout(clock)
        clock = setTimeout(() => end("stopped", `stopped after ${seconds} seconds. A phone may be too slow for this cell`, true), 1000 * seconds)
        at.state("running", said.begins === cell.id ? words : words.replace("running", "running what this cell needs"))
      } else if (said.died) end("failed", "Python has ended: " + said.died.slice(0, 500) + " Run starts it again.", true)
      else if (said.cell) show(said, turn)
      else { mark(said); end(turn.failed ? "failed" : "done", turn.failed || "done", false) }
    }
    const edited = Object.fromEntries(Object.values(cells).filter(c => c.isEdited()).map(c => [c.id, c.box.value]))
    worker.postMessage({files: isNew ? loaded : undefined, sources: isNew ? sources : undefined, wanted: cell.id, edited})
  }

  // what a cell has printed and shown stands below it; its built figures stay, but those that can be moved follow
  const show = (said, turn) => {
    const cell = cells[said.cell]
    if (said.error) {
      const own = cell === turn.cell || cell === turn.at
      turn.failed = own ? "an error: see below" : "a cell above, which this one needs, has failed" + (cell ? "" : `: ${said.error.type}: ${said.error.text}`)
    }
    if (!cell) return
    const parts = said.printed ? [make("pre", {textContent: said.printed})] : []
    let figures = 0
    for (const one of said.shown) {
      if (one?.text !== undefined) parts.push(make("pre", {textContent: one.text}))
      if (one?.markdown !== undefined) parts.push(make("pre", {textContent: one.markdown}))
      if (one?.figure !== undefined) redraw(`plotly-${cell.id}-${figures++}`, one.figure)
    }
    if (said.error) {
      const line = said.error.line ? ` in line ${said.error.line}` : ""
      parts.push(make("p", {className: "verdict", textContent: `${said.error.type}${line}: ${said.error.text}`}))
    }
    if (cell.differs && parts.length) parts.push(make("p", {className: "old", textContent: `Not all of these numbers are those above: ${cell.differs}.`}))
    cell.output.replaceChildren(...parts)
    if (cell === turn.cell && turn.at !== cell) turn.at.output.replaceChildren(...parts.map(part => part.cloneNode(true)))
    cell.ran = true
    cell.block.classList.toggle("ran", !!parts.length)
  }
  const redraw = (key, figure) => {
    const stored = document.querySelector(`script[data-plotly="${key}"]`)
    if (!stored) return
    stored.textContent = figure
    document.dispatchEvent(new Event("figures"))
  }
  const mark = ({fresh, touched}) => {
    for (const cell of Object.values(cells)) {
      const isOld = cell.ran ? !fresh.includes(cell.id) : touched.includes(cell.id)
      cell.block.classList.toggle("stale", isOld)
      cell.old.textContent = isOld ? (cell.ran ? "older than an edit: run it again" : "from the unedited run") : ""
    }
  }

  const keys = (event, box, go) => {  // Tab indents, Escape and then Tab leaves; with Ctrl, Enter runs
    const type = text => document.execCommand("insertText", false, text) || box.setRangeText(text, box.selectionStart, box.selectionEnd, "end")
    if (event.key === "Tab" && !event.shiftKey && !box.leaving) { event.preventDefault(); type("    ") }
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go() }
    else if (event.key === "Enter" && !event.isComposing) {
      const line = box.value.slice(0, box.selectionStart).split("\n").pop()
      event.preventDefault(); type("\n" + line.match(/^ */)[0] + (line.endsWith(":") ? "    " : ""))
    }
    box.leaving = event.key === "Escape"
  }
  const build = (place, original) => {
    const block = make("div", {className: "cell-runner"})
    const before = place.previousElementSibling
    const [start, stop, edit, again] = ["Run", "Stop", "Edit", "Start over"].map(text => make("button", {type: "button", textContent: text}))
    const status = make("span", {className: "state"}), old = make("span", {className: "old"}), output = make("div", {className: "page-output"})
    output.setAttribute("role", "status")
    const box = make("textarea", {value: original, spellcheck: false, rows: original.split("\n").length + 1, autocapitalize: "off", hidden: true})
    box.setAttribute("aria-label", "This cell, in Python")
    box.title = "Tab indents; Escape, then Tab, leaves; Control and Enter run it"
    const cell = cells[place.dataset.cell] = {
      id: place.dataset.cell, seconds: Number(place.dataset.seconds), differs: place.dataset.differs, block, box, output, old, ran: false,
      isEdited: () => box.value !== original,
      put: text => { box.value = text; box.hidden = text === original; edit.textContent = box.hidden ? "Edit" : "Close"; box.rows = text.split("\n").length + 1; again.disabled = text === original },
      state: (stage, words) => {
        block.dataset.run = stage
        status.textContent = words
        stop.disabled = stage !== "loading" && stage !== "running"
        again.disabled = !cell.isEdited()
      },
    }
    stop.disabled = again.disabled = true
    start.onclick = () => run(cell)
    stop.onclick = () => { if (busy?.at === cell) end("stopped", "stopped", true) }
    edit.onclick = () => { box.hidden = !box.hidden; edit.textContent = box.hidden ? "Edit" : "Close"; if (!box.hidden) box.focus() }
    again.onclick = () => { box.value = original; again.disabled = true; remember(); run(cell) }
    box.onkeydown = event => keys(event, box, () => run(cell))
    box.oninput = () => { again.disabled = !cell.isEdited(); remember(); if (cell.ran) { block.classList.add("stale"); old.textContent = "older than an edit: run it again" } }
    const check = checkOf(place.dataset.cell)
    const checks = make("button", {type: "button", textContent: "Check"})
    checks.onclick = () => run(cells[check], cell)
    block.append(box, make("div", {className: "keys"}, ...(check ? [checks, edit] : [start, edit]), stop, again, status, old), output)
    place.append(block)
    if (before?.classList.contains("cell")) before.classList.add("runs")
  }
  // what was edited stays in the browser until it is forgotten; a link and a notebook hold it, too
  const HELD = "edited cells: " + location.pathname
  const bar = make("div", {className: "edited-cells", hidden: true}), told = make("span", {className: "state"})
  const editedCells = () => Object.values(cells).filter(cell => cell.isEdited())
  const editedTexts = () => Object.fromEntries(editedCells().map(cell => [cell.id, cell.box.value]))
  const showEdited = () => {
    const n = editedCells().length
    bar.hidden = !n
    bar.firstChild.textContent = n === 1 ? "1 cell is edited" : `${n} cells are edited`
    told.textContent = ""
  }
  const remember = () => {
    const texts = editedTexts()
    try { Object.keys(texts).length ? localStorage.setItem(HELD, JSON.stringify(texts)) : localStorage.removeItem(HELD) } catch { /* a browser without storage */ }
    showEdited()
  }
  const restore = texts => {  // what a link holds is not kept before the reader edits it
    for (const [id, text] of Object.entries(texts ?? {})) if (cells[id] && typeof text === "string") cells[id].put(text)
    showEdited()
  }
  const held = () => { try { return JSON.parse(localStorage.getItem(HELD)) } catch { return null } }
  const share = async () => {
    const link = `${location.href.split("#")[0]}#cells=${await packed(editedTexts())}`
    try { await navigator.clipboard.writeText(link); told.textContent = "The link is copied." } catch { history.replaceState(null, "", link); told.textContent = "The address of this page holds your edits now." }
  }
  const notebook = () => {
    const texts = editedTexts(), title = document.querySelector("h1")?.firstChild?.textContent ?? "A lesson"
    const code = sources.map(([id, source]) => ({cell_type: "code", id, metadata: {}, execution_count: null, outputs: [], source: texts[id] ?? source}))
    const head = {cell_type: "markdown", id: "title", metadata: {}, source: `# ${title}\n\nThe cells of ${location.href.split("#")[0]} with my edits in ${Object.keys(texts).length} of them.`}
    const kernelspec = {name: "python3", display_name: "Python 3", language: "python"}
    return JSON.stringify({cells: [head, ...code], metadata: {kernelspec}, nbformat: 4, nbformat_minor: 5}, null, 1)
  }
  const keep = async () => {
    const [link, download, forget] = ["Share", "Download as a notebook", "Forget the edits"].map(text => make("button", {type: "button", textContent: text}))
    link.onclick = share
    download.onclick = () => save(location.pathname.split("/").pop().replace(/\.html$/, "") + "_edited.ipynb", notebook())
    forget.onclick = () => { for (const cell of editedCells()) cell.put(original[cell.id]); remember() }
    bar.append(make("span"), link, download, forget, told)
    ;(document.querySelector("article") ?? document.body).append(bar)
    const inAddress = /^#cells=([\w-]+)$/.exec(location.hash)
    let texts = held()
    try { if (inAddress) texts = await unpacked(inAddress[1]) } catch { /* an address may hold anything */ }
    restore(texts)
  }

  // an exercise begins with `def my_…`, and the next cell checks it
  const checkOf = id => {
    const at = sources.findIndex(one => one[0] === id)
    if (!/^def my_\w+\(/m.test(sources[at][1]) || !/: \.\.\.\s*$/.test(sources[at][1])) return undefined
    return /^def check_\w+\(/m.test(sources[at + 1]?.[1] ?? "") ? sources[at + 1][0] : undefined
  }
  const original = Object.fromEntries(sources)
  for (const place of document.querySelectorAll(".run-here")) build(place, original[place.dataset.cell])
  keep()
})()
