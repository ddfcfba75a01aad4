// Timelines under a slider: one of several is shown, on the axes of all.
//
// Every number comes from Python (_slider.py); here it gets a place on the screen.

const LEFT = 92, HIGH = 22, FOOT = 22, NAMESPACE = "http:" + "//www.w3.org/2000/svg";

// Where the bars of a frame lie: [x, y, width, height, kind, label] in a picture of this width.
export function boxes(data, frame, width) {
  const scale = (width - LEFT - 10) / (data.to - data.from);
  return data.frames[frame].bars.map(([row, kind, start, stop, label]) => [
    LEFT + (start - data.from) * scale, row * HIGH + 2, (stop - start) * scale, HIGH - 4, kind, label,
  ]);
}

export function ticks(data) {
  const length = data.to - data.from, raw = 10 ** Math.floor(Math.log10(length / 8));
  const step = raw * [1, 2, 5, 10].find((n) => length / (raw * n) <= 8);
  const found = [];
  for (let i = Math.ceil(data.from / step - 1e-9); i * step <= data.to + 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

export function mount(root, data) {
  const make = (tag, given, ...inside) => {
    const made = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };
  root.querySelector("img").remove();
  const picture = make("svg", { role: "img" });
  const slider = document.createElement("input"), told = document.createElement("output");
  const label = document.createElement("label"), controls = document.createElement("div");
  Object.assign(slider, { type: "range", min: 0, max: data.frames.length - 1, value: data.first });
  label.append(`${data.parameter} `, slider);
  controls.append(label, told);
  root.prepend(controls, picture);

  function hatch(kind, number) {
    const given = { id: `${data.id}-${number}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    const lines = {
      "/": "M-2 10 10-2M-2 2 2-2M6 10 10 6", "\\": "M-2-2 10 10M6-2 10 2M-2 6 2 10",
      "-": "M0 4H8", ".": "M1 2H3M5 6H7", "+": "M0 4H8M4 0V8",
      x: "M-2 10 10-2M-2 2 2-2M6 10 10 6M-2-2 10 10M6-2 10 2M-2 6 2 10",
    };
    const path = [...new Set(kind.hatch)].map((mark) => lines[mark] ?? "").join("");
    return make("pattern", given,
      make("rect", { width: 8, height: 8, fill: kind.color }),
      make("path", { d: path, stroke: "black", "stroke-width": 0.8, fill: "none" }));
  }

  function draw() {
    const frame = data.frames[slider.value], width = Math.max(300, root.clientWidth);
    const height = data.rows.length * HIGH, scale = (width - LEFT - 10) / (data.to - data.from);
    picture.setAttribute("viewBox", `0 0 ${width} ${height + FOOT}`);
    picture.setAttribute("aria-label", `${data.parameter}: ${frame.title}. ${frame.words}`);
    const parts = [make("defs", {}, ...data.kinds.map(hatch))];
    data.rows.forEach((name, row) => {
      const at = { x: LEFT - 8, y: row * HIGH + HIGH / 2, "text-anchor": "end" };
      parts.push(make("text", { ...at, "dominant-baseline": "middle" }, name));
    });
    for (const [x, y, wide, high, kind, name] of boxes(data, slider.value, width)) {
      const fill = `url(#${data.id}-${kind})`, line = wide > 4 ? 0.6 : 0.15;
      const box = { x, y, width: Math.max(wide, 0.5), height: high, fill };
      parts.push(make("rect", { ...box, stroke: "black", "stroke-width": line }));
      const room = 6.5 * name.length + 4;
      if (!name || room > wide) continue;
      const middle = x + wide / 2, back = { x: middle - room / 2, y: y + 3, width: room };
      parts.push(make("rect", { ...back, height: high - 6, fill: "white", opacity: 0.85 }));
      const text = { x: middle, y: y + high / 2 + 1, "text-anchor": "middle", fill: "black" };
      parts.push(make("text", { ...text, "dominant-baseline": "middle" }, name));
    }
    for (const tick of ticks(data)) {
      const x = LEFT + (tick - data.from) * scale, at = { x, y: height + 15 };
      parts.push(make("path", { d: `M${x} ${height}v4`, stroke: "currentColor" }));
      parts.push(make("text", { ...at, "text-anchor": "middle" }, `${tick}`));
    }
    const end = { x: width - 2, y: height + 15, "text-anchor": "end" };
    parts.push(make("path", { d: `M${LEFT} ${height}H${width - 8}`, stroke: "currentColor" }));
    parts.push(make("text", end, data.unit));
    picture.replaceChildren(...parts);
    told.textContent = frame.title;
    slider.setAttribute("aria-valuetext", frame.title);
  }
  slider.oninput = draw;
  new ResizeObserver(draw).observe(root);
  draw();
}
