// Paste your log: the doctor of the package, run in the page. docs/paste.py writes the page; _static/python.js, page_files.js and doctor_files.js are loaded when they are needed.
(() => {
  const place = document.querySelector(".paste")
  if (!place) return
  const SECONDS = 60, LARGEST = 64_000_000, root = document.documentElement.dataset.content_root || "./"
  const SVG = "http://www.w3.org/2000/svg"
  const make = (name, set = {}, ...inside) => { const e = Object.assign(document.createElement(name), set); e.append(...inside); return e }
  const draw = (name, set = {}, ...inside) => { const e = document.createElementNS(SVG, name); for (const [key, value] of Object.entries(set)) e.setAttribute(key, value); e.append(...inside); return e }
  const find = name => place.querySelector(name)
  const [box, state, answer, chooser] = [".paste-text", ".state", ".paste-answer", ".paste-files"].map(find)
  const data = JSON.parse(find(".paste-data").textContent)  // lessons by path, example logs by name
  let files, worker, busy, clock, chosen = {}

  // Runs in the worker, where this text is its whole source: what is opened from disk may start a worker from a blob alone
  const work = () => {
    let examine
    const start = async files => {
      const text = name => new TextDecoder().decode(files[name])
      self.fetch = async url => new Response(files[String(url).split("/").pop()], {headers: {"content-type": "application/wasm"}});
      (0, eval)(text("pyodide.asm.js")); (0, eval)(text("pyodide.js"))
      const python = await loadPyodide({indexURL: "https://here.invalid/"})
      const found = {...JSON.parse(text("page_files.json")), ...JSON.parse(text("doctor_files.json"))}
      for (const [path, source] of Object.entries(found)) {
        const place = "/page/" + path
        python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")))
        python.FS.writeFile(place, source)
      }
      python.runPython("import sys; sys.path.insert(0, '/page'); import page_tensors; page_tensors.install(); import page_doctor")
      return python.pyimport("page_doctor").examine_files
    }
    onmessage = async ({data: {files, texts}}) => {
      try {
        examine ??= await start(files)
        postMessage({started: true})
        postMessage({said: examine(JSON.stringify(texts))})
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
  const load = () => files ??= Promise.all(["python.js", "page_files.js", "doctor_files.js"].map(script))
    .then(async () => Object.fromEntries(await Promise.all(Object.entries({...PYTHON, "page_files.json": PAGE_FILES, "doctor_files.json": DOCTOR_FILES}).map(async ([name, text]) => [name, await unpack(text)]))))

  const end = (words, kill) => {
    clearTimeout(clock)
    if (kill) { worker?.terminate(); worker = undefined }
    busy = undefined
    state.textContent = words
    find(".paste-stop").disabled = true
    place.removeAttribute("aria-busy")
  }
  const examine = async texts => {
    if (!Object.values(texts).some(text => text.trim())) { answer.replaceChildren(); return end("There is nothing to read yet: paste a log, choose its file, or try the example.", false) }
    if (busy) end("", true)
    const turn = busy = {}
    place.setAttribute("aria-busy", "true")
    find(".paste-stop").disabled = false
    state.textContent = worker ? "reading" : "Python is loading: 7 MB, once"
    let loaded
    try { loaded = await load() } catch { files = undefined }
    if (busy !== turn) return
    if (!loaded) return end("Python could not be loaded: this browser is too old for it, or files are missing in _static", true)
    const isNew = !worker
    if (isNew) {
      worker = new Worker(URL.createObjectURL(new Blob([`(${work})()`], {type: "text/javascript"})))
      worker.onerror = e => end("Python could not be started: " + e.message, true)
    }
    worker.onmessage = ({data: {started, died, said}}) => {
      if (busy !== turn) return
      if (started) {
        state.textContent = "reading"
        clock = setTimeout(() => end(`stopped after ${SECONDS} seconds: give fewer lines, or ask the command`, true), 1000 * SECONDS)
      } else if (died) end("Python has ended: " + died.slice(0, 500), true)
      else { show(JSON.parse(said)); end("done", false) }
    }
    worker.postMessage({files: isNew ? loaded : undefined, texts})
  }

  // --- the answer
  const section = (title, ...inside) => make("section", {}, make("h3", {textContent: title}), ...inside)
  const folded = (title, ...inside) => make("details", {}, make("summary", {textContent: title}), ...inside)
  const line = (label, text) => make("p", {}, make("span", {className: "label", textContent: label + " "}), text)
  const lesson = path => {
    const {url, title} = data.lessons[path]
    return make("p", {className: "to-lesson"}, make("span", {className: "label", textContent: "lesson "}), make("a", {href: root + url, textContent: title}))
  }
  const box_of = found => make("div", {className: `finding ${found.severity}`},
    make("p", {}, make("b", {textContent: `${found.severity.toUpperCase()}  ${found.name}: `}), found.what),
    line("seen", found.evidence), line("cure", found.cure), lesson(found.lesson))
  const show = said => {
    if (said.refused !== undefined) return answer.replaceChildren(make("p", {className: "refused", textContent: `The doctor cannot read this: ${said.refused}`}))
    const version = said.version ? `, version ${said.version} by its names` : ""
    const rows = Object.entries(said.read).map(([ours, theirs]) => make("tr", {}, make("td", {}, make("code", {textContent: ours})), make("td", {}, make("code", {textContent: theirs}))))
    const names = list => list.length ? list.join(", ") + "." : "none."
    answer.replaceChildren(
      make("h2", {textContent: `${said.program}${version}: ${said.steps} logged ${said.unit}${said.steps === 1 ? "" : "s"}`}),
      ...said.ignored.map(name => make("p", {className: "note", textContent: `${name} was not used.`})),
      ...said.notes.map(text => make("p", {className: "note", textContent: text})),
      section("Findings", ...(said.findings.length ? said.findings.map(box_of) : [make("p", {className: "nothing", textContent: said.nothing})])),
      section("Curves", make("div", {className: "paste-curves"}, ...Object.entries(said.curves).map(([title, points]) => curve(title, points, step => `${said.unit} ${step + said.first}`)))),
      section("What was used",
        folded(`${rows.length} numbers were read`, make("div", {className: "wide"}, make("table", {}, make("thead", {}, make("tr", {}, make("th", {textContent: "our name"}), make("th", {textContent: "in this log"}))), make("tbody", {}, ...rows)))),
        folded(`${said.unused.length} numbers were not used`, make("p", {textContent: names(said.unused)})),
        folded(`${said.asked.length} rules could be asked`, make("p", {textContent: names(said.asked)})),
        folded(`${said.not_asked.length} rules could not, for want of numbers`, make("p", {textContent: names(said.not_asked)})),
        folded("As the command prints it", make("pre", {className: "as-printed", textContent: said.text}))))
    answer.querySelector("h2").scrollIntoView({block: "nearest"})
  }

  // --- a curve: one line, its first and last step, its least and largest number
  const short = x => Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(1) : String(+x.toPrecision(4))
  const curve = (title, points, name) => {
    const [WIDTH, HEIGHT] = [300, 90]
    const [steps, numbers] = [points.map(p => p[0]), points.map(p => p[1])]
    const [first, last] = [steps[0], steps[steps.length - 1]]
    const low = numbers.reduce((a, b) => Math.min(a, b)), high = numbers.reduce((a, b) => Math.max(a, b))
    const x = step => last > first ? WIDTH * (step - first) / (last - first) : WIDTH / 2
    const y = number => high > low ? HEIGHT * (high - number) / (high - low) : HEIGHT / 2
    const at = points.map(([step, number]) => `${x(step).toFixed(1)},${y(number).toFixed(1)}`)
    const picture = draw("svg", {viewBox: `-4 -4 ${WIDTH + 8} ${HEIGHT + 8}`, preserveAspectRatio: "none", role: "img"},
      draw("polyline", {points: at.join(" ")}), ...(points.length === 1 ? [draw("circle", {cx: x(first), cy: y(numbers[0]), r: 3})] : []))
    picture.setAttribute("aria-label", `${title}: ${short(numbers[0])} in ${name(first)}, ${short(numbers[numbers.length - 1])} in ${name(last)}, between ${short(low)} and ${short(high)}`)
    return make("figure", {}, make("figcaption", {}, title, make("b", {textContent: " " + short(numbers[numbers.length - 1])})),
      make("div", {className: "frame"}, make("span", {className: "high", textContent: short(high)}), make("span", {className: "low", textContent: short(low)}), picture),
      make("div", {className: "steps"}, make("span", {textContent: name(first)}), make("span", {textContent: name(last)})))
  }

  // --- the controls
  const given = () => Object.keys(chosen).length ? chosen : {"pasted.txt": box.value}
  const choose = async list => {
    const many = [...list], total = many.reduce((sum, file) => sum + file.size, 0)
    if (!many.length) return
    if (total > LARGEST) { answer.replaceChildren(); return end(`${many.map(file => file.name).join(", ")}: ${Math.round(total / 1e6)} MB are more than a tab reads (${LARGEST / 1e6} MB). The command reads them.`, true) }
    chosen = Object.fromEntries(await Promise.all(many.map(async file => [file.name, await file.text()])))
    const names = Object.keys(chosen)
    box.value = names.length === 1 && total < 2_000_000 ? chosen[names[0]] : ""
    find(".paste-chosen").textContent = `chosen: ${names.join(", ")}`
    examine(given())
  }
  const forget = () => { chosen = {}; chooser.value = ""; find(".paste-chosen").textContent = "" }
  box.oninput = forget
  box.onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) examine(given()) }
  box.ondrop = event => { if (event.dataTransfer.files.length) { event.preventDefault(); choose(event.dataTransfer.files) } }
  find(".paste-run").onclick = () => examine(given())
  find(".paste-choose").onclick = () => chooser.click()
  chooser.onchange = () => choose(chooser.files)
  find(".paste-stop").onclick = () => { if (busy) end("stopped", true) }
  find(".paste-clear").onclick = () => { if (busy) end("", true); forget(); box.value = ""; answer.replaceChildren(); state.textContent = ""; box.focus() }
  for (const button of place.querySelectorAll("[data-example]")) button.onclick = () => { forget(); box.value = data.examples[button.dataset.example]; examine(given()) }
  place.hidden = false
})()
