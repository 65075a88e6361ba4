// The editor of the loss: the exported source, what the reader makes of it, and where something is wrong with it.
import { element } from "./charts.js"
import { packed, save, unpacked } from "./keep.js"

const HELD = "playground: edited loss" // in the browser's storage

// --- texts in the browser ---------------------------------------------------------------------------------------------
function remembered() {
  try { return JSON.parse(localStorage.getItem(HELD)) ?? {} } catch { return {} }
}

function remember(texts) {
  try { Object.keys(texts).length ? localStorage.setItem(HELD, JSON.stringify(texts)) : localStorage.removeItem(HELD) } catch { /* a browser without storage */ }
}

// only texts of parts that there are: an address may hold anything
function onlyTexts(given, exported) {
  return Object.fromEntries(Object.entries(given ?? {}).filter(([part, text]) => part in exported && typeof text === "string" && text !== exported[part]))
}

// --- a file to keep ---------------------------------------------------------------------------------------------------
// a notebook with the text, in which the package uses it
export function notebook(part, text, module) {
  const code = source => ({ cell_type: "code", id: `cell-${code.n = (code.n ?? 0) + 1}`, metadata: {}, execution_count: null, outputs: [], source })
  const names = [...text.matchAll(/^(?:def|class) (\w+)|^([A-Z_]+)\b.* = /gm)].map(found => found[1] ?? found[2])
  const cells = [
    { cell_type: "markdown", id: "title", metadata: {}, source: `# My ${part}\n\nEdited in the playground. The package uses it from the last cell on.` },
    code(`import ${module} as module\n\nglobals().update({name: x for name, x in vars(module).items() if not name.startswith("__")})`), code(text),
    code(`vars(module).update(${names.map(name => `${name}=${name}`).join(", ")})`)]
  return JSON.stringify({ cells, metadata: { kernelspec: { name: "python3", display_name: "Python 3", language: "python" } }, nbformat: 4, nbformat_minor: 5 }, null, 1)
}

// --- the editor -------------------------------------------------------------------------------------------------------
export class Editor {
  // sources: {exported: texts by part, modules: by part, plugin: the part that is a text of the reader's own}; edits: the prepared ones
  // train(texts): trains with these; builtIn(): with the loss in JavaScript again
  constructor({ sources, edits, train, builtIn }) {
    Object.assign(this, { sources, edits, train, builtIn, texts: {}, own: null, part: "surrogate" }) // own: the reader's texts, while a prepared edit is shown
    const at = this.at = id => document.getElementById(`pg-${id}`)
    for (const part of Object.keys(sources.exported)) at("part").append(element("option", { value: part, text: part === sources.plugin ? "a loss of your own (plug-in)" : part }))
    for (const edit of edits) {
      const button = element("button", { type: "button", text: edit.title, "data-edit": edit.name })
      button.addEventListener("click", () => { this.make(edit); this.trainNow() })
      at("edits").append(button)
    }
    at("part").addEventListener("change", () => this.show(at("part").value))
    at("text").addEventListener("input", () => this.changed())
    at("text").addEventListener("keydown", event => this.key(event))
    at("train").addEventListener("click", () => this.trainNow())
    at("original").addEventListener("click", () => this.startOver())
    at("built-in").addEventListener("click", () => { this.say("Trains with the built-in loss, in JavaScript."); at("built-in").hidden = true; this.builtIn() })
    at("share").addEventListener("click", () => this.share())
    at("download").addEventListener("click", () => this.download())
  }

  // what an address or an earlier visit has left
  async begin({ edit, loss }) {
    const inAddress = /^#loss=([\w-]+)$/.exec(location.hash)
    let texts = remembered()
    if (inAddress) {
      try { texts = await unpacked(inAddress[1]) } catch { this.say("The address holds no loss that can be read.") }
    }
    this.texts = onlyTexts(texts, this.sources.exported)
    const prepared = this.edits.find(one => one.name === edit)
    if (prepared) this.make(prepared)
    else this.show(Object.keys(this.texts)[0] ?? (loss in this.sources.exported ? loss : "surrogate"))
    if (Object.keys(this.texts).length && !prepared) this.say(`Edited ${inAddress ? "by the sender of this link" : "on an earlier visit"}: ${Object.keys(this.texts).join(", ")}.`)
  }

  textOf(part) { return this.texts[part] ?? this.sources.exported[part] }

  show(part) {
    this.part = part
    this.at("part").value = part
    this.at("text").value = this.textOf(part)
    this.forgetMistake()
    this.fit()
  }

  changed() {
    const text = this.at("text").value
    this.own = null
    if (text === this.sources.exported[this.part]) delete this.texts[this.part]
    else this.texts[this.part] = text
    this.forgetMistake()
    this.kept()
    this.fit()
  }

  kept() {
    remember(this.texts)
    if (location.hash.startsWith("#loss=")) history.replaceState(null, "", location.pathname + location.search)
  }

  // the numbers of the lines, and which parts are edited
  fit() {
    const { at } = this, lines = at("text").value.split("\n").length
    at("text").rows = lines
    at("lines").textContent = Array.from({ length: lines }, (_, i) => i + 1).join("\n")
    at("original").disabled = !(this.part in this.texts)
    for (const option of at("part").options) option.text = option.text.replace(" · edited", "") + (option.value in this.texts ? " · edited" : "")
  }

  // back to the exported text; after a prepared edit, to what the reader had before it
  startOver() {
    if (this.own) this.texts = this.own
    else delete this.texts[this.part]
    this.own = null
    this.kept()
    this.show(this.part)
  }

  // a prepared edit on the exported source, alone; it is not kept
  make({ part, old, new: now }) {
    this.own ??= this.texts
    this.texts = { [part]: this.sources.exported[part].replace(old, () => now) }
    this.show(part)
    const place = this.textOf(part).indexOf(now)
    this.at("text").setSelectionRange(place, place + now.length)
    this.scrollTo(this.textOf(part).slice(0, place).split("\n").length)
  }

  scrollTo(line) {
    const box = this.at("editor")
    box.scrollTop = Math.max(0, (line - 4) * this.lineHeight())
  }

  lineHeight() { return parseFloat(getComputedStyle(this.at("text")).lineHeight) }

  // Tab indents, Escape and then Tab leaves; Enter keeps the indent; with Control it trains
  key(event) {
    const box = this.at("text"), type = text => document.execCommand("insertText", false, text) || box.setRangeText(text, box.selectionStart, box.selectionEnd, "end")
    if (event.key === "Tab" && !event.shiftKey && !this.leaving) { event.preventDefault(); type("    ") }
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.trainNow() }
    else if (event.key === "Enter" && !event.isComposing) {
      const line = box.value.slice(0, box.selectionStart).split("\n").pop()
      event.preventDefault()
      type("\n" + line.match(/^ */)[0] + (line.endsWith(":") ? "    " : ""))
    }
    this.leaving = event.key === "Escape"
  }

  trainNow() {
    this.forgetMistake()
    this.at("built-in").hidden = false
    const { sources, part } = this, texts = { ...this.texts }
    delete texts[sources.plugin] // a plug-in is trained with where it is shown
    if (part === sources.plugin) texts[part] = this.textOf(part)
    return this.train(texts)
  }

  say(words) { this.at("loss-state").textContent = words }

  forgetMistake() {
    this.at("mistake").hidden = true
    this.at("mistake-line").hidden = true
  }

  // beside the line, where there is one
  showMistake({ part, line, message }) {
    const { at } = this
    if (part && part !== this.part) this.show(part)
    at("mistake").textContent = line ? `Line ${line}: ${message}` : message
    at("mistake").hidden = false
    if (line) {
      at("mistake-line").hidden = false
      at("mistake-line").style.top = `calc(.4rem + ${(line - 1) * this.lineHeight()}px)`
      at("mistake-line").style.height = `${this.lineHeight()}px`
      this.scrollTo(line)
    }
    at("mistake").style.top = `calc(.4rem + ${(line ?? 0) * this.lineHeight()}px)`
    if (!line) at("editor").scrollTop = 0
  }

  // an address that holds the edits
  async link() { return `${location.href.split(/[?#]/)[0]}?loss=${encodeURIComponent(this.part)}#loss=${await packed(this.texts)}` }

  async share() {
    const link = await this.link()
    try {
      await navigator.clipboard.writeText(link)
      this.say("The link is copied: it holds your edits.")
    } catch {
      history.replaceState(null, "", link)
      this.say("The address of this page holds your edits now: copy it from above.")
    }
  }

  download() {
    if (this.part === this.sources.plugin) return save("my_loss.py", this.textOf(this.part))
    save(`my_${this.part.replace(" ", "_").toLowerCase()}.ipynb`, notebook(this.part, this.textOf(this.part), this.sources.modules[this.part]))
  }
}
