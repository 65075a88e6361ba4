// A table of sentences that is wider than a phone: its rows stand below one another, each cell behind its column's name (goose.css)
(() => {
  const said = cell => cell.textContent.trim(), phone = matchMedia("(max-width: 46em)");
  const tables = [...document.querySelectorAll("article table.docutils")].filter(table => {
    const names = [...table.querySelectorAll(":scope > thead th")].map(said), cells = [...table.querySelectorAll(":scope > tbody td")];
    const words = cells.reduce((sum, cell) => sum + (said(cell).match(/\p{L}{3,}/gu) || []).length, 0) / cells.length;
    cells.forEach(cell => { cell.dataset.label = names[cell.cellIndex]; });
    return names.length > 2 && words >= 1.2 && !table.querySelector("[colspan], [rowspan]");
  });
  const lay = () => tables.forEach(table => {
    table.classList.remove("sentences");
    table.classList.toggle("sentences", phone.matches && table.scrollWidth > table.closest(".table-wrapper, article").clientWidth + 1);
  });
  addEventListener("load", lay); phone.addEventListener("change", lay); addEventListener("toggle", lay, true);
})();

// A line of code that is wider than its place goes on below, four letters further in than it began; what is copied stays the same
(() => {
  const wide = matchMedia("(min-width: 46.01em)");
  const go = () => wide.matches && document.querySelectorAll("article div.highlight pre:not(.continued)").forEach(pre => {
    if (pre.scrollWidth <= pre.clientWidth + 1 || [...pre.querySelectorAll("span")].some(token => token.textContent.includes("\n"))) return;
    const lines = pre.innerHTML.split("\n");
    const made = lines.map((line, i) => {
      const span = Object.assign(document.createElement("span"), { className: "line", innerHTML: i + 1 < lines.length ? line + "\n" : line });
      const further = span.textContent.match(/^ */)[0].length + 4;
      span.style.paddingLeft = `${further}ch`;
      span.style.textIndent = `-${further}ch`;
      return span;
    });
    if (!made.at(-1).textContent) made.pop();
    pre.replaceChildren(...made);
    pre.classList.add("continued");
  });
  addEventListener("load", go); addEventListener("resize", go); addEventListener("toggle", go, true);
})();

// What must be scrolled sideways can be reached by key
(() => {
  const reach = () => document.querySelectorAll("article :is(pre, .table-wrapper, .katex-display)").forEach(box => box.toggleAttribute("tabindex", box.scrollWidth > box.clientWidth) && (box.tabIndex = 0));
  addEventListener("load", reach); addEventListener("resize", reach); addEventListener("toggle", reach, true);
})();

// Plotly figures, stored as JSON beside their place, drawn in the page's colours by the local plotly.js, on pages that have any
(() => {
  const figures = [...document.querySelectorAll("script[data-plotly]")];
  if (!figures.length) return;
  const night = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => { const t = document.body.dataset.theme; return t === "dark" || (t !== "light" && night.matches); };
  const draw = () => figures.forEach(script => {
    const [ink, line] = isDark() ? ["#d5d7db", "#3c3f44"] : ["#262626", "#dcdfe4"];
    const { data, layout = {}, frames } = JSON.parse(script.textContent.replaceAll("#262626", ink));
    const family = getComputedStyle(document.body).fontFamily;
    const own = { template: undefined, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { ...layout.font, family, color: ink } };
    for (const key of Object.keys(layout).filter(k => /^[xy]axis\d*$/.test(k)).concat(["xaxis", "yaxis"]))
      own[key] = { ...layout[key], gridcolor: line, zerolinecolor: line };
    own.sliders = (layout.sliders || []).map(s => ({ ...s, bgcolor: isDark() ? "#7aa7ff" : "#2563eb", bordercolor: line, activebgcolor: ink, tickcolor: ink }));
    own.updatemenus = (layout.updatemenus || []).map(m => ({ ...m, bgcolor: "rgba(0,0,0,0)", bordercolor: line, font: { color: ink } }));
    const box = document.getElementById(script.dataset.plotly);
    Plotly.react(box, data, { ...layout, width: undefined, ...own }, { responsive: true, displayModeBar: false })
      .then(() => frames && frames.length && !box.framed && (box.framed = true, Plotly.addFrames(box, frames)));
  });
  const library = document.createElement("script");
  library.src = (document.documentElement.dataset.content_root || "./") + "_static/plotly.min.js";
  library.onload = () => {
    draw();
    new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
    night.addEventListener("change", draw);
    document.addEventListener("figures", draw);  // a cell of the page has made another
  };
  document.head.append(library);
})();
