// The search: what find.py has collected, ranked. The page that teaches a word before its glossary entry, a page before a section, a section before a name of a like word; from disk too.
(() => {
  const british = w => w.replace(/iz(?=(e|es|ed|er|ers|ing|ation|ations)$)/, "is") // optimization and optimisation are one word
  const single = w => w.length > 3 ? british(w).replace(/ies$/, "y").replace(/([^s])s$/, "$1") : w
  const stem = word => { // resume, resumes, resumed and resuming are one word
    const w = single(word), root = w.replace(/(ing|ed)$/, "")
    return root !== w && root.length > 3 ? root.replace(/([bdgmnprt])\1$/, "$1") : w.length > 4 ? w.replace(/e$/, "") : w
  }
  const GREEK = {α: "alpha", β: "beta", γ: "gamma", δ: "delta", ε: "epsilon", λ: "lambda", π: "pi", ρ: "rho"}
  const split = text => (text.toLowerCase().replace(/[αβγδελπρ]/g, letter => ` ${GREEK[letter]} `).normalize("NFKD").replace(/[\u0300-\u036f]/g, "").match(/[\p{L}\p{N}]+/gu) || []).map(stem)
  const LITTLE = new Set("a an and are as at be between by can do does for from how i if in is it its my of on or own should than that the their this to versus vs was what when which who why will with you your".split(" ").map(stem))
  const content = words => { const left = words.filter(w => !LITTLE.has(w)); return left.length ? left : words } // what a question asks about
  const count = words => words.reduce((m, w) => m.set(w, (m.get(w) || 0) + 1), new Map())
  const RANK = {changelog: .3, contributing: .3, api: .2, quiz: .6, tables: .6, speed: .6, glossary: .3, index: .8}

  // once: the words of each field, and how rare each is
  const sections = [], names = [], seen = new Map()
  for (const page of INDEX.pages) {
    page.words = content(split(page.title)); page.below = content(split(page.subtitle))
    page.parts = page.sections.map(([id, heading, text], i) => ({page, id: i ? id : "", heading, text, words: content(split(heading)), counts: count(split(heading + " " + text)), first: !i}))
    sections.push(...page.parts)
    for (const [id, name, said] of page.names) names.push({page, id, name, said, words: split(name), below: split(said)})
  }
  for (const s of sections) for (const w of s.counts.keys()) seen.set(w, (seen.get(w) || 0) + 1)
  const rare = w => Math.log(1 + sections.length / (1 + (seen.get(w) || 0)))
  const terms = INDEX.terms.map(([term, meaning, url, others, anchor]) => ({term, meaning, url, anchor, ways: [term, ...others].map(way => content(split(way)))}))

  // the share of the query that a field has, less where it has much else; the last word may still be half typed
  const like = (q, w) => w === q || (q.length > 2 && w.startsWith(q) ? .6 : 0)
  const cover = (query, words) => query.reduce((sum, q) => sum + Math.max(0, ...words.map(w => +like(q, w))), 0) / query.length
  const match = (query, words) => words.length ? cover(query, words) ** 2 * Math.sqrt(Math.min(1, query.length / words.length)) : 0
  const same = (a, b) => a.length === b.length && a.every((w, i) => w === b[i])

  const longer = q => q.length > 2 ? [...seen.keys()].filter(w => w !== q && w.startsWith(q)) : []

  function inText(query, more, part) {
    let sum = 0, all = true
    for (const q of query) {
      const n = part.counts.get(q) || .5 * more.get(q).reduce((k, w) => k + (part.counts.get(w) || 0), 0)
      sum += rare(q) * n / (n + 1.5); all &&= n > 0
    }
    return (all ? 1 : .3) * sum / Math.sqrt(query.length)
  }

  function search(text) {
    const query = content(split(text)), asked = text.trim().replace(/\(\)$/, "").replace(/^instruct_goose\./, ""), found = []
    if (!query.length) return []
    const more = new Map(query.map(q => [q, longer(q)]))
    const isName = /[_.]|[a-z][A-Z]/.test(asked)
    const taught = new Map(), weight = words => words.reduce((sum, w) => sum + rare(w), 0), whole = weight(query)
    for (const t of terms) {
      const exact = t.ways.some(w => same(w, query)), near = Math.max(...t.ways.map(w => match(query, w)))
      const within = Math.max(...t.ways.map(w => w.every(word => query.includes(word)) ? weight(w) / whole : 0)) // a term of the field in a longer question
      if (exact || near > .5 || within > .2) taught.set(t.url, Math.max(taught.get(t.url) || 0, exact ? 260 : 25 * Math.max(near > .5 ? near : 0, within)))
      if (t.anchor && (exact || near > .7)) found.push({kind: "Glossary", title: t.term, href: `glossary.html#${t.anchor}`, excerpt: t.meaning, score: exact ? 200 : 30 * near})
    }
    for (const page of INDEX.pages) {
      const scored = page.parts.map(p => [inText(query, more, p) + (p.first ? 0 : 14 * match(query, p.words)), p]).sort((a, b) => b[0] - a[0])
      const [best, fitting] = scored[0], title = match(query, page.words), part = title > .9 ? page.parts[0] : fitting
      const score = ((taught.get(page.url) || 0) + 30 * title + 6 * match(query, page.below) + best + .3 * (scored[1]?.[0] || 0)) * (RANK[page.url] || 1)
      if (!best && !title && !taught.has(page.url)) continue
      found.push({kind: page.part, title: page.title, heading: part.first ? "" : part.heading, href: page.url + ".html" + (part.first ? "" : "#" + part.id),
        excerpt: part.text || page.subtitle, score})
    }
    for (const page of INDEX.pages) for (const [id, word, said, of] of page.rows) if (word === asked && page.url !== "api")
      found.push({kind: (of ? `Field of ${of}, in ` : "Row of a table, in ") + page.title, title: word, code: true, href: `${page.url}.html#${id}`, excerpt: said, score: ((isName ? 250 : 38) + (of === "RLHFConfig" ? .5 : 0)) * (RANK[page.url] || 1)})
    for (const n of names) {
      const last = n.name.split(".").pop(), exact = n.name === asked || last === asked || n.id === "instruct_goose." + asked
      const score = exact ? (n.name === asked ? 2 : 0) + (isName ? 300 : 40) : 12 * match(query, n.words) + 3 * match(query, n.below)
      if (score > 2) found.push({kind: "Name, from " + n.page.title, title: n.name, code: true, href: `${n.page.url}.html#${n.id}`, excerpt: n.said, score})
    }
    return found.sort((a, b) => b.score - a.score)
  }

  // a piece of the text with as many of the words as will go into it
  function excerpt(text, query, length = 230) {
    const at = [...text.matchAll(/[\p{L}\p{N}]+/gu)].filter(m => query.some(q => like(q, split(m[0])[0] || "")))
    let from = 0, most = 0
    for (const m of at) {
      const kinds = new Set(at.filter(n => n.index >= m.index && n.index < m.index + length - 40).map(n => split(n[0])[0])).size
      if (kinds > most) [most, from] = [kinds, m.index]
    }
    if (from < 80) from = 0
    else { const sentence = text.slice(0, from).search(/[.!?] [^.!?]*$/); from = sentence >= 0 && from - sentence < 110 ? sentence + 2 : text.lastIndexOf(" ", from - 40) + 1 }
    let to = from + length
    if (to < text.length) to = text.lastIndexOf(" ", to)
    const p = document.createElement("p")
    let done = from
    if (from) p.append("… ")
    for (const m of at) if (m.index >= from && m.index + m[0].length <= to) {
      const mark = document.createElement("mark"); mark.textContent = m[0]
      p.append(text.slice(done, m.index), mark); done = m.index + m[0].length
    }
    p.append(text.slice(done, to), to < text.length ? " …" : "")
    return p
  }

  const make = (name, text, kind) => Object.assign(document.createElement(name), {textContent: text || "", className: kind || ""})
  const list = document.querySelector("ol.search"), status = document.querySelector("#found"), form = document.querySelector("#find"), box = form.elements.q
  function show() {
    const text = box.value.trim(), found = search(text), query = content(split(text))
    list.replaceChildren(...found.slice(0, 30).map(r => {
      const li = make("li"), a = make("a", r.code ? "" : r.title)
      a.href = r.href
      if (r.code) a.append(make("code", r.title))
      li.append(a, make("small", r.heading ? `${r.kind} · ${r.heading}` : r.kind), excerpt(r.excerpt, query))
      return li
    }))
    status.textContent = !text ? "" : !found.length ? `Nothing for “${text}”. Fewer or other words may help.` :
      `${found.length > 30 ? `The first 30 of ${found.length}` : found.length} for “${text}”`
  }
  box.value = new URLSearchParams(location.search).get("q") || ""
  box.addEventListener("input", () => { show(); try { history.replaceState(null, "", "?q=" + encodeURIComponent(box.value)) } catch {} })
  form.addEventListener("submit", e => { e.preventDefault(); show() })
  window.findInSite = search
  show()
})()
