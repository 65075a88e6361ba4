// Small line charts: an SVG that stretches to its place, with its labels in HTML.

const SVG = "http://www.w3.org/2000/svg"

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) name === "text" ? made.textContent = value : made.setAttribute(name, value)
  made.append(...children)
  return made
}

export class Chart {
  // low and high are what the axis shows at least
  constructor(title, unit, low, high, show) {
    Object.assign(this, { title, unit, low, high, show })
    this.value = element("b")
    this.svg = document.createElementNS(SVG, "svg")
    this.svg.setAttribute("viewBox", "0 0 100 100")
    this.svg.setAttribute("preserveAspectRatio", "none")
    this.svg.setAttribute("role", "img")
    this.top = element("span", { class: "pg-top" })
    this.bottom = element("span", { class: "pg-bottom" })
    this.end = element("span", { class: "pg-end" })
    this.node = element("figure", { class: "pg-chart" }, element("figcaption", {}, `${title} `, this.value), element("div", { class: "pg-plot", "aria-hidden": "false" }, this.svg, this.top, this.bottom, this.end))
  }

  // runs: lists of numbers, the last of them is the present one; marks: iterations at which a setting was changed
  draw(runs, marks) {
    const all = runs.flat().filter(Number.isFinite), present = runs[runs.length - 1]
    const low = Math.min(this.low, ...all), high = Math.max(this.high, ...all), longest = Math.max(60, ...runs.map(r => r.length))
    const x = i => (100 * i / longest).toFixed(2), y = v => (100 - 100 * (v - low) / (high - low)).toFixed(2)
    const line = (points, kind) => {
      const path = document.createElementNS(SVG, "path")
      path.setAttribute("d", points)
      path.setAttribute("class", kind)
      return path
    }
    const curve = run => run.map((v, i) => `${i ? "L" : "M"}${x(i + 1)} ${y(v)}`).join("")
    this.svg.replaceChildren(...(low < 0 && high > 0 ? [line(`M0 ${y(0)}H100`, "pg-zero")] : []), ...marks.map(i => line(`M${x(i)} 0V100`, "pg-mark")),
      ...runs.slice(0, -1).map(run => line(curve(run), "pg-earlier")), line(curve(present), "pg-present"))
    const last = present[present.length - 1]
    this.value.textContent = last === undefined ? "" : this.show(last)
    this.top.textContent = this.show(high)
    this.bottom.textContent = this.show(low)
    this.end.textContent = String(longest)
    this.svg.setAttribute("aria-label", last === undefined ? `${this.title}: no run yet` : `${this.title}: ${this.show(present[0])} at iteration 1, ${this.show(last)} at iteration ${present.length}`)
  }
}
