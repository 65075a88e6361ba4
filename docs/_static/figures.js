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
