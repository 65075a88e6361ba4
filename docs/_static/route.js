// A reader on one of the routes of the front page: Next and Previous at the foot follow it. ?route= says which, and this browser remembers it
(() => {
  const facts = document.querySelector(".lesson-facts"), data = document.getElementById("on-routes");
  if (!facts) return;
  const keep = value => { try { value ? localStorage.setItem("route", JSON.stringify(value)) : localStorage.removeItem("route"); } catch {} };
  const kept = () => { try { return JSON.parse(localStorage.getItem("route")) || {}; } catch { return {}; } };
  const here = data ? JSON.parse(data.textContent) : {}, asked = new URLSearchParams(location.search).get("route");
  const id = asked in here ? asked : kept().id, route = here[id];
  if (!route && !kept().href) return;
  const make = (name, text, more) => Object.assign(document.createElement(name), { textContent: text, ...more });
  const line = make("p", "", { className: "on-route" }), leave = make("button", "leave it", { type: "button" });
  if (route) {
    keep({ id, name: route.name, title: document.title.split(" - ")[0], href: location.origin + location.pathname + "?route=" + id });
    line.append("On the route ", make("b", route.name), `, ${route.place} of ${route.of} `, leave);
    for (const way of ["next", "prev"]) {
      const card = document.querySelector(`a.${way}-page`), there = route[way];
      if (!card || !there) continue;
      card.href = there.href;
      card.querySelector(".title").textContent = there.title;
      document.querySelector(`link[rel=${way}]`)?.setAttribute("href", there.href);
    }
  } else line.append("Beside the route ", make("b", kept().name), ": back to ", make("a", kept().title, { href: kept().href }), " ", leave);
  leave.onclick = () => { keep(null); location.search ? location.search = "" : location.reload(); };
  facts.after(line);
})();
