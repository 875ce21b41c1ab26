"use strict";
// Shows what is under the pointer. All values come from the tables of the page, and are set as text, never as markup.
(() => {
  const box = document.getElementById("pointer");
  const make = (name, text) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const drawn = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  const show = (heading, lines, x, y) => {
    box.replaceChildren(make("b", heading));
    for (const { name, style, text } of lines) {
      const row = make("div");
      const label = make("i", name);
      label.className = style || "";
      row.append(label, make("span", text));
      box.append(row);
    }
    box.hidden = false;
    const room = 14;
    const left = x + room + box.offsetWidth > innerWidth ? x - room - box.offsetWidth : x + room;
    const top = y + room + box.offsetHeight > innerHeight ? y - room - box.offsetHeight : y + room;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  };

  // The points of a chart, read once from its table: where they are, their row, and their line.
  const pointsOf = (figure, table) => {
    if (figure.points) return figure.points;
    const heads = [...table.tHead.rows[0].cells];
    const title = heads[0].textContent;
    figure.points = [...table.tBodies[0].querySelectorAll("td[data-at]")].map((cell) => {
      const [x, y] = cell.dataset.at.split(",").map(Number);
      const line = heads[cell.cellIndex].querySelector("span");
      const place = `${title} ${cell.parentNode.cells[0].textContent}`;
      return { x, y, place, name: line.textContent, style: line.className, text: cell.textContent };
    });
    return figure.points;
  };

  const chosen = new Set();
  const isShown = (name) => !chosen.size || chosen.has(name);

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
    const svg = figure.querySelector("svg");
    const table = figure.querySelector("table.values");
    const marks = drawn("g", { "aria-hidden": "true" });
    svg.append(marks);
    let current = 0;

    const onScreen = (x, y) => {
      const point = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
      return [point.x, point.y];
    };
    const hide = () => {
      marks.replaceChildren();
      box.hidden = true;
    };

    const showCell = (client, label) => {
      const [left, top, width, height] = svg.dataset.grid.split(" ").map(Number);
      const row = table.tBodies[0].rows[client];
      const cell = row && label >= 0 && label < row.cells.length - 2 ? row.cells[label + 1] : null;
      if (!cell) return hide();
      const [x, y] = [left + client * width, top + label * height];
      marks.replaceChildren(drawn("rect", { x, y, width, height, class: "mark" }));
      const heading = `client ${row.cells[0].textContent}, ${table.tHead.rows[0].cells[label + 1].textContent}`;
      const lines = [
        { name: "training samples", text: cell.textContent },
        { name: "all classes", text: row.cells[row.cells.length - 1].textContent },
      ];
      show(heading, lines, ...onScreen(x + width / 2, y + height));
    };
    const showColumn = (point, all) => {
      const here = all.filter((other) => other.x === point.x);
      const [top, bottom] = [12, svg.viewBox.baseVal.height - 46];
      marks.replaceChildren(drawn("line", { x1: point.x, x2: point.x, y1: top, y2: bottom, class: "cursor" }));
      for (const { x, y } of here) marks.append(drawn("circle", { cx: x, cy: y, r: 4, class: "mark" }));
      show(point.place, here, ...onScreen(point.x, point.y));
    };
    const showPoint = (point) => {
      marks.replaceChildren(drawn("circle", { cx: point.x, cy: point.y, r: 5, class: "mark" }));
      show(point.place, [point], ...onScreen(point.x, point.y));
    };
    const showNearest = (x, y) => {
      const all = pointsOf(figure, table).filter((point) => isShown(point.name));
      if (!all.length) return hide();
      const column = figure.dataset.mode === "column";
      const far = (point) => (column ? Math.abs(point.x - x) : Math.hypot(point.x - x, point.y - y));
      const nearest = all.reduce((best, point) => (far(point) < far(best) ? point : best));
      current = all.indexOf(nearest);
      if (column) showColumn(nearest, all);
      else showPoint(nearest);
    };

    svg.addEventListener("pointermove", (event) => {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      if (figure.dataset.mode !== "grid") return showNearest(place.x, place.y);
      const [left, top, width, height] = svg.dataset.grid.split(" ").map(Number);
      showCell(Math.floor((place.x - left) / width), Math.floor((place.y - top) / height));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      if (figure.dataset.mode === "grid") {
        const rows = table.tBodies[0].rows;
        const [clients, classes] = [rows.length, rows[0].cells.length - 2];
        const along = event.key === "ArrowLeft" || event.key === "ArrowRight" ? classes : 1;
        current = (current + step * along + clients * classes) % (clients * classes);
        return showCell(Math.floor(current / classes), current % classes);
      }
      const all = pointsOf(figure, table).filter((point) => isShown(point.name));
      if (!all.length) return;
      let next = current;
      if (figure.dataset.mode === "column") {
        const places = [...new Set(all.map((point) => point.x))].sort((a, b) => a - b);
        const index = places.indexOf((all[current] || all[0]).x) + (marks.childNodes.length ? step : 0);
        next = all.findIndex((point) => point.x === places[(index + places.length) % places.length]);
        current = next;
        return showColumn(all[next], all);
      }
      current = (current + step + all.length) % all.length;
      showPoint(all[current]);
    });
    return { figure, hide };
  });

  // The legend: pressed methods stay, the others become faint.
  const highlight = () => {
    for (const { hide } of charts) hide();
    for (const part of document.querySelectorAll("svg [data-name]")) {
      part.classList.toggle("faint", !isShown(part.dataset.name));
      part.classList.toggle("chosen", chosen.has(part.dataset.name));
    }
    for (const part of document.querySelectorAll("tbody th [data-name]")) {
      part.closest("tr").classList.toggle("faint", !isShown(part.dataset.name));
    }
  };
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const name = button.dataset.name;
      if (!chosen.delete(name)) chosen.add(name);
      button.setAttribute("aria-pressed", String(chosen.has(name)));
      highlight();
    });
  }
  addEventListener("scroll", () => charts.forEach(({ hide }) => hide()), { passive: true });

  for (const text of document.querySelectorAll("pre.command")) {
    if (!navigator.clipboard) break;
    const button = make("button", "copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    });
    text.after(button);
  }
})();
