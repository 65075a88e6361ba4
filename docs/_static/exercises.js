// Exercises that run on the page: an editor, Python in a worker, the checker's verdict. docs/exercises.py writes their places and _static/python.js.
(() => {
  const SECONDS = 10, root = document.documentElement.dataset.content_root || "./"
  const make = (name, set = {}, ...inside) => { const e = Object.assign(document.createElement(name), set); e.append(...inside); return e }
  let files, worker, busy, clock  // busy: the exercise that is being run

  // Runs in the worker, where this text is its whole source: what is opened from disk may start a worker from a blob alone, and fetch nothing
  const work = () => {
    let check
    const start = async files => {
      const text = name => new TextDecoder().decode(files[name])
      self.fetch = async url => new Response(files[String(url).split("/").pop()], {headers: {"content-type": "application/wasm"}});
      (0, eval)(text("pyodide.asm.js")); (0, eval)(text("pyodide.js"))
      const python = await loadPyodide({indexURL: "https://here.invalid/"})
      return python.runPython(text("answer.py") + "\ncheck")
    }
    onmessage = async ({data: {files, code, exercise}}) => {
      try {
        check ??= await start(files)
        postMessage({started: true})
        postMessage(JSON.parse(check(code, exercise)))
      } catch (error) { postMessage({died: String(error)}) }
    }
  }

  const bytesOf = text => {  // a loop: Uint8Array.from takes a second for Python
    const letters = atob(text), bytes = new Uint8Array(letters.length)
    for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i)
    return bytes
  }
  const unpack = async text => new Response(new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()
  const load = () => files ??= new Promise((done, failed) => document.head.append(make("script", {src: root + "_static/python.js", onload: done, onerror: failed})))
    .then(async () => Object.fromEntries(await Promise.all(Object.entries(PYTHON).map(async ([name, text]) => [name, await unpack(text)]))))

  // The end of a run: with a verdict, or with a worker that is no longer of use
  const end = (verdict, printed = "", kill = true) => {
    clearTimeout(clock)
    if (kill) { worker?.terminate(); worker = undefined }
    busy?.say(verdict, printed)
    busy = undefined
  }
  const run = async exercise => {
    if (busy) end("stopped")
    const turn = busy = {...exercise}
    turn.say("")
    turn.state("Python is loading: 7 MB, once")
    let loaded
    try { loaded = await load() } catch { files = undefined }
    if (busy !== turn) return
    if (!loaded) return end("Python could not be loaded: _static/python.js did not come, or this browser is too old for it")
    if (!worker) {
      worker = new Worker(URL.createObjectURL(new Blob([`(${work})()`], {type: "text/javascript"})))
      worker.onerror = e => end("Python could not be started: " + e.message)
    }
    worker.onmessage = ({data}) => {
      if (busy !== turn) return
      if (data.started) { turn.state("running"); clock = setTimeout(() => end(`stopped after ${SECONDS} seconds: is there a loop without an end?`), 1000 * SECONDS) }
      else if (data.died) end("Python has ended: " + data.died.slice(0, 500) + "\nRun starts it again.")
      else end(data.verdict, data.printed, false)
    }
    worker.postMessage({files: worker.fed ? undefined : loaded, code: exercise.code(), exercise: exercise.data})
    worker.fed = true
  }

  const keys = (event, box, go) => {  // Tab indents, Escape and then Tab leaves; Enter keeps the indent; with Ctrl it runs
    const type = text => document.execCommand("insertText", false, text) || box.setRangeText(text, box.selectionStart, box.selectionEnd, "end")
    if (event.key === "Tab" && !event.shiftKey && !box.leaving) { event.preventDefault(); type("    ") }
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go() }
    else if (event.key === "Enter" && !event.isComposing) {
      const line = box.value.slice(0, box.selectionStart).split("\n").pop()
      event.preventDefault(); type("\n" + line.match(/^ */)[0] + (line.endsWith(":") ? "    " : ""))
    }
    box.leaving = event.key === "Escape"
  }
  const build = place => {
    const data = place.querySelector("script").textContent, {name, begin} = JSON.parse(place.dataset.begin)
    const box = make("textarea", {value: begin, spellcheck: false, rows: begin.split("\n").length + 3, autocapitalize: "off"})
    const [start, stop, again] = ["Run", "Stop", "Start over"].map(text => make("button", {type: "button", textContent: text}))
    const state = make("span"), said = make("p", {className: "verdict"}), printed = make("pre", {hidden: true}), log = make("div", {className: "said"}, state, said, printed)
    const exercise = {
      data, code: () => box.value,
      state: text => { state.textContent = text; stop.disabled = !text },
      say: (verdict, text = "") => { exercise.state(""); said.textContent = verdict; said.classList.toggle("right", verdict === "right"); printed.textContent = text; printed.hidden = !text },
    }
    box.title = "Tab indents; Escape, then Tab, leaves; Control and Enter run it"
    box.setAttribute("aria-label", `Your ${name}, in Python`)
    log.setAttribute("role", "status")
    box.onkeydown = event => keys(event, box, () => run(exercise))
    start.onclick = () => run(exercise)
    stop.onclick = () => { if (busy?.say === exercise.say) end("stopped") }
    again.onclick = () => { stop.onclick(); box.value = begin; exercise.say("") }
    exercise.state("")
    place.append(box, make("div", {className: "keys"}, start, stop, again), log, place.querySelector("details"))
    box.focus()
  }
  for (const place of document.querySelectorAll(".try")) {
    const open = make("button", {type: "button", textContent: "Run here"})
    const line = make("p", {}, open, " plain Python, nothing to install")
    open.onclick = () => { build(place); line.remove(); place.querySelector("details").hidden = false }
    place.querySelector("details").hidden = true
    place.prepend(line)
    place.hidden = false
  }
})()
