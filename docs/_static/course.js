// What this browser remembers of the course: a tick for each lesson whose end was seen. And the notation, opened beside a page
(() => {
  const read = () => { try { return JSON.parse(localStorage.getItem("read")) || []; } catch { return []; } };
  const tick = () => { const done = read(); document.querySelectorAll("[data-lesson]").forEach(n => n.classList.toggle("read", done.includes(n.dataset.lesson)) && (n.title = "read")); };
  const end = document.querySelector("[data-read]");
  if (end) new IntersectionObserver((seen, watch) => {
    if (!seen.some(s => s.isIntersecting)) return;
    watch.disconnect();
    try { localStorage.setItem("read", JSON.stringify([...new Set([...read(), end.dataset.read])])); } catch {}
    tick();
  }).observe(end);
  tick();

  // what the search box offers while one types; the list is loaded when somebody goes there
  const beside = document.currentScript && document.currentScript.src.replace(/course\.js.*$/, "suggestions.js");
  const offer = box => {
    const list = Object.assign(document.createElement("datalist"), { id: "suggestions" });
    box.setAttribute("list", list.id);
    if (!beside || document.getElementById(list.id)) return;
    const script = Object.assign(document.createElement("script"), { src: beside });
    script.onload = () => { list.append(...SUGGESTIONS.map(value => Object.assign(document.createElement("option"), { value }))); };
    document.body.append(list, script);
  };
  for (const box of document.querySelectorAll("input.sidebar-search, #find input[name=q]"))
    if (box === document.activeElement || box.autofocus) offer(box); // the page of the search begins there
    else box.addEventListener("focus", () => offer(box), { once: true });

  // on a wide screen the front page shows the playground; elsewhere the reader opens it
  const shown = document.querySelector(".playground-frame");
  if (shown && !end && matchMedia("(min-width: 60rem)").matches) shown.open = true;

  if (self !== top) document.documentElement.classList.add("within"); // this page is the one that was opened beside another
  const link = document.querySelector("a.beside");
  if (!link) return;
  link.addEventListener("click", click => {
    if (click.ctrlKey || click.metaKey || click.shiftKey || !window.HTMLDialogElement) return;
    click.preventDefault();
    let box = document.querySelector("dialog.beside");
    if (!box) {
      box = Object.assign(document.createElement("dialog"), { className: "beside" });
      box.setAttribute("aria-label", "Notation");
      const close = Object.assign(document.createElement("button"), { type: "button", textContent: "Close" });
      close.onclick = () => box.close();
      box.append(close, Object.assign(document.createElement("iframe"), { src: link.href, title: "Notation" }));
      document.body.append(box);
    }
    box.open ? box.close() : box.show();
  });
  addEventListener("keydown", key => { if (key.key === "Escape") document.querySelector("dialog.beside")?.close(); });
})();
