"use strict";
(function () {
  const root = document.documentElement, said = document.getElementById("said");
  const lengths = (document.body.dataset.lengths || "").split(",").filter(Boolean).map(Number);
  const height = Number(document.body.dataset.height), limit = height - Number(document.body.dataset.limit);

  document.getElementById("theme").addEventListener("click", function () {
    const dark = root.dataset.theme ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const only = document.getElementById("only");
  only.addEventListener("click", function () {
    const on = document.body.classList.toggle("only");
    only.setAttribute("aria-pressed", String(on));
  });
  document.getElementById("all").addEventListener("click", function () {
    const boxes = document.querySelectorAll("details"), open = !boxes[0] || !boxes[0].open;
    boxes.forEach(function (box) { box.open = open; });
  });

  // A link into a closed layer opens it.
  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const box = target && target.closest("details");
    if (box && !box.open) { box.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", reveal);
  reveal();

  // Printing shows what differs in full and leaves the rest closed, unless it was opened.
  let closed = [];
  addEventListener("beforeprint", function () {
    closed = Array.from(document.querySelectorAll("details.differs:not([open])"));
    closed.forEach(function (box) { box.open = true; });
  });
  addEventListener("afterprint", function () { closed.forEach(function (box) { box.open = false; }); });

  function token(row, ratio) {
    for (let request = 0; request < lengths.length; request += 1) {
      const own = Math.floor(lengths[request] / ratio);
      if (row < own) { return "request " + request + " position " + ((row + 1) * ratio - 1); }
      row -= own;
    }
    return "row " + row;
  }

  function barHeight(svg, bin) {
    let found = 0;
    svg.querySelectorAll("path").forEach(function (path) {
      for (const bar of path.getAttribute("d").matchAll(/M(\d+) \d+v-(\d+)h(\d+)/g)) {
        const start = Number(bar[1]);
        if (bin >= start && bin < start + Number(bar[3])) { found = Number(bar[2]); }
      }
    });
    return found;
  }

  function binsOf(svg) { return svg.viewBox.baseVal.width; }

  function tell(svg, bin) {
    const bins = binsOf(svg), rows = Number(svg.dataset.r.split(" ")[0]), ratio = Number(svg.dataset.r.split(" ")[1]);
    const first = Math.ceil(bin * rows / bins), last = Math.ceil((bin + 1) * rows / bins) - 1;
    const high = barHeight(svg, bin), mark = svg.querySelector("rect") || svg.appendChild(document.createElementNS(svg.namespaceURI, "rect"));
    mark.setAttribute("width", 1);
    mark.setAttribute("height", height);
    mark.setAttribute("x", bin);
    svg.dataset.bin = bin;
    let error = "no error";
    if (high > limit) { error = high === height ? "1e8 x limit or more" : "beyond the limit, about 1e" + ((high - limit) / (height - limit) * 8).toFixed(1) + " x"; }
    else if (high) { error = "at most " + Math.pow(10, (high / limit - 1) * 4).toPrecision(1) + " x limit"; }
    said.textContent = token(first, ratio) + (last > first ? " to " + token(last, ratio) : "") + ": " + error;
    svg.setAttribute("aria-valuenow", bin);
    svg.setAttribute("aria-valuetext", said.textContent);
  }

  // One listener for thousands of strips.
  function strip(event) { return event.target.closest && event.target.closest(".strip svg"); }

  function leave(event) {
    const svg = strip(event), mark = svg && svg.querySelector("rect");
    if (!svg || svg.contains(event.relatedTarget)) { return; }
    said.textContent = "";
    if (mark) { mark.remove(); }
  }

  addEventListener("pointermove", function (event) {
    const svg = strip(event);
    if (!svg) { return; }
    const bins = binsOf(svg), box = svg.getBoundingClientRect();
    tell(svg, Math.min(bins - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * bins))));
  }, true);
  addEventListener("keydown", function (event) {
    const svg = strip(event), bins = svg && binsOf(svg);
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 16, PageUp: -16, Home: -bins, End: bins }[event.key];
    if (!svg || step === undefined) { return; }
    event.preventDefault();
    tell(svg, Math.min(bins - 1, Math.max(0, Number(svg.dataset.bin || 0) + step)));
  }, true);
  addEventListener("focusin", function (event) {
    const svg = strip(event);
    if (!svg) { return; }
    // Keys move along it: to a screen reader it is a slider, which is also what lets the keys through.
    svg.setAttribute("role", "slider");
    svg.setAttribute("aria-valuemin", 0);
    svg.setAttribute("aria-valuemax", binsOf(svg) - 1);
    tell(svg, Number(svg.dataset.bin || 0));
  });
  addEventListener("pointerout", leave);
  addEventListener("focusout", leave);
  document.body.classList.add("ready");
})();
