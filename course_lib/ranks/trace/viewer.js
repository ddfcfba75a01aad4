// The timeline of a run, to be moved in: zoom, follow a message, play the clock, choose ranks.
//
// Everything that is known about the run comes from Python (viewer.py): which event lies in which
// lane, which receive belongs to a send, who waits for whom. Here it gets a place on the screen.
// Times are whole nanoseconds.

const LEFT = 62, FOOT = 26, GAP = 0.08, ARROWS = 60, LINES = 240, ROWS = 300;

// Which ranks a text names: "0-3, 8". All if it is empty, null if it cannot be read.
export function ranksIn(text, worldSize) {
  const all = [...Array(worldSize).keys()];
  if (!text.trim()) return all;
  const named = new Set();
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const found = /^(\d+)(?:[-–](\d+))?$/.exec(part);
    if (!found) return null;
    const [first, last] = [Number(found[1]), Number(found[2] ?? found[1])];
    if (first > last || last >= worldSize) return null;
    for (let rank = first; rank <= last; rank++) named.add(rank);
  }
  return all.filter((rank) => named.has(rank));
}

// The part of time that is seen after zooming by a factor around a moment, within [0, end].
export function zoomed(view, factor, around, end) {
  const length = Math.min(end, Math.max(10, (view.to - view.from) / factor));
  const part = (around - view.from) / (view.to - view.from);
  const from = Math.min(Math.max(0, around - part * length), end - length);
  return { from, to: from + length };
}

export function moved(view, by, end) {
  const from = Math.min(Math.max(0, view.from + by), end - (view.to - view.from));
  return { from, to: from + view.to - view.from };
}

// Round moments for the axis, at most `most` of them.
export function ticks(view, per, most) {
  const length = (view.to - view.from) / per;
  const raw = 10 ** Math.floor(Math.log10(length / most));
  const step = raw * [1, 2, 5, 10].find((n) => length / (raw * n) <= most);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let i = Math.ceil(view.from / per / step - 1e-9); i * step * per <= view.to + 1e-6; i++)
    found.push({ at: i * step * per, text: (i * step).toFixed(digits) });
  return found;
}

// Where things lie: a row for each rank shown, a strip in it for each lane.
export function layout(data, ranks, width, view) {
  const high = Math.max(9, Math.min(22 * data.lanes, 460 / ranks.length));
  const rows = new Map(ranks.map((rank, row) => [rank, row]));
  const strip = (high * (1 - 2 * GAP)) / data.lanes;
  const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - LEFT - 8);
  const time = (px) => view.from + ((px - LEFT) / (width - LEFT - 8)) * (view.to - view.from);
  const y = (i) => high * (rows.get(data.rank[i]) + GAP) + strip * data.lane[i];
  return { rows, high, strip, x, y, time, height: high * ranks.length };
}

// The events that can be seen, in the order of their start.
export function visible(data, rows, view) {
  const found = [];
  for (let i = 0; i < data.rank.length; i++)
    if (data.end[i] >= view.from && data.start[i] <= view.to && rows.has(data.rank[i]))
      found.push(i);
  return found;
}

// The event under a point, or near it: -1 if there is none.
export function eventAt(data, place, seen, px, py) {
  let best = -1, least = 5;
  for (const i of seen) {
    const top = place.y(i);
    if (py < top || py > top + place.strip) continue;
    const off = Math.max(place.x(data.start[i]) - px, px - place.x(data.end[i]), 0);
    if (off < least) [best, least] = [i, off];
  }
  return best;
}

// When a message leaves: once both ranks have come.
export const leaves = (data, i) => (data.until[i] < 0 ? data.start[i] : data.until[i]);

const spoken = { send: "to", recv: "from" };

// What an event is, in words, as lines.
export function told(data, i) {
  const kind = data.kinds[data.kind[i]].name, length = data.end[i] - data.start[i];
  const peer = data.peer[i] < 0 ? "" : ` ${spoken[kind] ?? "root"} ${data.peer[i]}`;
  const size = data.sizes[data.size[i]], group = data.groups[data.group[i]];
  const about = [kind + peer, size, group].filter(Boolean).join(" · ");
  const lines = [`rank ${data.rank[i]}: ${about}`];
  const from = timeText(data, data.start[i]), to = timeText(data, data.end[i]);
  lines.push(`${from} to ${to} ${data.unit}, ${timeText(data, length)} ${data.unit} long`);
  if (data.until[i] >= 0) {
    const waited = timeText(data, data.until[i] - data.start[i]);
    lines.push(`waits ${waited} ${data.unit} for rank ${data.waitsFor[i]}`);
  }
  return lines;
}

export function timeText(data, time) {
  return (time / data.per).toFixed(3);
}

// ---------------------------------------------------------------------------------------------

export function mount(root, data) {
  const make = (tag, name, text = "") => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.textContent = text;
    return made;
  };
  root.replaceChildren();
  const bar = make("div", "bar"), canvas = make("canvas"), about = make("div", "about");
  const legend = make("div", "legend"), table = make("details"), rowsOf = make("div", "rows");
  const hint = make("p", "hint");
  hint.textContent =
    "Mouse: drag to move, Ctrl + wheel to zoom, click an event to keep its text here. Keys: " +
    "← → previous or next event, ↑ ↓ previous or next rank, Enter: other end of a message, " +
    "+ − 0: zoom, space: play.";
  table.append(make("summary", "", "As a table"), rowsOf);
  const button = (text, says, does) => {
    const made = make("button", "", text);
    made.type = "button";
    made.setAttribute("aria-label", says);
    made.title = says;
    made.onclick = does;
    bar.append(made);
    return made;
  };
  if (data.title) bar.append(make("strong", "", data.title));
  const play = button("▶", "play the clock", () => toggle());
  button("+", "zoom in", () => zoom(1.6));
  button("−", "zoom out", () => zoom(1 / 1.6));
  button("whole", "show the whole run", () => see({ from: 0, to: data.finish }));
  const clock = make("input", "clock");
  Object.assign(clock, { type: "range", min: 0, max: 1000, value: 1000 });
  clock.setAttribute("aria-label", "clock: events after this time are pale");
  const choose = make("input", "ranks");
  Object.assign(choose, { type: "text", placeholder: "all, or 0-3, 8", size: 12 });
  const label = make("label", "", "ranks ");
  label.append(choose);
  bar.append(clock, label);
  about.setAttribute("role", "status");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", data.words);
  root.append(bar, legend, canvas, about, hint, table);

  let ranks = ranksIn("", data.worldSize), view = { from: 0, to: data.finish };
  let place = null, seen = [], held = -1, over = -1, now = Infinity, playing = 0, waiting = false;
  const pen = canvas.getContext("2d");
  const fills = data.kinds.map((kind) => hatched(kind.color, kind.hatch, pen));
  const blank = { name: "waits for a rank", color: "", hatch: "" };
  for (const kind of data.until.some((time) => time >= 0) ? [...data.kinds, blank] : data.kinds) {
    const entry = make("span", ""), swatch = make("canvas");
    Object.assign(swatch, { width: 22, height: 12 });
    const small = swatch.getContext("2d");
    small.fillStyle = kind.color && hatched(kind.color, kind.hatch, small);
    if (kind.color) small.fillRect(0, 0, 22, 12);
    small.strokeStyle = "#888";
    small.strokeRect(0.5, 0.5, 21, 11);
    entry.append(swatch, ` ${kind.name}`);
    legend.append(entry);
  }

  function soon() {
    if (!waiting) requestAnimationFrame(() => { waiting = false; draw(); });
    waiting = true;
  }

  function draw() {
    const width = Math.max(280, root.clientWidth), dots = window.devicePixelRatio || 1;
    place = layout(data, ranks, width, view);
    seen = visible(data, place.rows, view);
    const height = place.height + FOOT;
    if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
      canvas.width = Math.round(width * dots);
      canvas.height = Math.round(height * dots);
      canvas.style.height = `${height}px`;
    }
    const ink = getComputedStyle(root).color;
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px sans-serif";
    pen.textBaseline = "middle";
    frame(ink, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT - 8, place.height);
    pen.clip();
    if (now < view.to) bars(ink, 0.15); // what is still to come is faint
    if (now < view.to) within(view.from, now, () => bars(ink, 1));
    else bars(ink, 1);
    const shown = over >= 0 ? over : held;
    messages(ink, shown);
    if (shown >= 0 && place.rows.has(data.rank[shown])) outline(shown, ink);
    if (now < data.finish) rule(place.x(now), ink);
    pen.restore();
    say(shown);
    if (table.open) write();
  }

  function frame(ink, width) {
    pen.fillStyle = pen.strokeStyle = ink;
    pen.textAlign = "right";
    const every = Math.ceil(12 / place.high);
    for (const [rank, row] of place.rows) {
      if (row % every === 0) pen.fillText(`rank ${rank}`, LEFT - 8, Math.max(6, place.high * (row + 0.5)));
      pen.globalAlpha = 0.25;
      pen.fillRect(LEFT, place.high * (row + 1) - 0.5, width - LEFT - 8, 0.6);
      pen.globalAlpha = 1;
    }
    pen.textAlign = "center";
    for (const tick of ticks(view, data.per, Math.max(2, Math.floor((width - LEFT) / 65)))) {
      const x = place.x(tick.at);
      pen.fillRect(x, place.height, 1, 4);
      const room = Math.max(LEFT, Math.min(width - 44, x));
      pen.fillText(tick.text, room, place.height + 13);
    }
    pen.textAlign = "right";
    pen.fillText(data.unit, width - 8, place.height + 13);
  }

  function within(from, to, does) {
    pen.save();
    pen.beginPath();
    pen.rect(place.x(from), 0, Math.max(0, place.x(to) - place.x(from)), place.height);
    pen.clip();
    does();
    pen.restore();
  }

  function bars(ink, alpha) {
    const taken = new Map(), texts = [], blanks = [], high = place.strip * 0.94;
    const wide = data.kinds.map(() => []), thin = data.kinds.map(() => []);
    for (const i of seen) {
      if (alpha === 1 && data.start[i] > now) continue;
      const kind = data.kind[i], y = place.y(i), key = y * 64 + kind;
      const left = place.x(data.start[i]), right = place.x(data.end[i]);
      const mid = data.until[i] < 0 ? left : place.x(data.until[i]);
      if (right - left < 0.5 && taken.get(key) > left - 0.5) continue; // drawn by its neighbour
      taken.set(key, left);
      if (mid - left > 1) {
        blanks.push([left, y, mid - left, high]);
        texts.push([left, mid, y + high / 2, `waits for ${data.waitsFor[i]}`, "waits"]);
      }
      (right - mid > 6 ? wide : thin)[kind].push([mid, y, Math.max(right - mid, 1), high]);
      if (right - mid > 20) {
        const name = data.kinds[kind].name;
        const arrow = { send: `→${data.peer[i]}`, recv: `←${data.peer[i]}`, compute: "" }[name];
        texts.push([mid, right, y + high / 2, arrow ?? name, ""]);
      }
    }
    pen.globalAlpha = alpha;
    pen.strokeStyle = ink;
    pen.lineWidth = 0.6;
    for (const box of blanks) pen.strokeRect(...box);
    pen.strokeStyle = "black";
    data.kinds.forEach((kind, number) => {
      pen.fillStyle = kind.color;
      for (const box of thin[number]) pen.fillRect(...box);
      pen.fillStyle = fills[number];
      for (const box of wide[number]) { pen.fillRect(...box); pen.strokeRect(...box); }
    });
    pen.globalAlpha = 1;
    if (place.strip < 11 || alpha < 1) return;
    pen.textAlign = "center";
    for (const [from, to, y, ...names] of texts) {
      const left = Math.max(from, LEFT), room = Math.min(to, canvas.clientWidth) - left;
      const text = names.find((name) => name && pen.measureText(name).width + 6 <= room);
      if (!text) continue;
      const middle = left + room / 2, wide = pen.measureText(text).width + 4;
      const blank = text.startsWith("waits");
      if (!blank) {
        pen.fillStyle = "rgba(255, 255, 255, 0.85)";
        pen.fillRect(middle - wide / 2, y - 6, wide, 12);
      }
      pen.fillStyle = blank ? ink : "black";
      pen.fillText(text, middle, y + 0.5);
    }
  }

  function messages(ink, shown) {
    const sends = seen.filter((i) => data.kinds[data.kind[i]].name === "send" && data.other[i] >= 0);
    const thick = sends.length <= ARROWS;
    for (const i of sends) {
      const mine = i === shown || data.other[i] === shown;
      if (!mine && sends.length > LINES && !(leaves(data, i) <= now && now < data.end[data.other[i]]))
        continue;
      message(i, ink, mine ? 2.2 : thick ? 0.9 : 0.4, mine || thick);
    }
    // The other end may lie outside of what is seen.
    if (shown >= 0 && data.other[shown] >= 0 && !sends.includes(shown)) {
      const send = data.kinds[data.kind[shown]].name === "send" ? shown : data.other[shown];
      if (!sends.includes(send)) message(send, ink, 2.2, true);
    }
  }

  function message(i, ink, thick, head) {
    const j = data.other[i];
    if (!place.rows.has(data.rank[i]) || !place.rows.has(data.rank[j])) return;
    if (data.rank[i] === data.rank[j] || leaves(data, i) > now) return;
    const down = place.y(j) > place.y(i), edge = place.strip * 0.94;
    const [x, y] = [place.x(leaves(data, i)), place.y(i) + (down ? edge : 0)];
    const [far, deep] = [place.x(data.end[j]), place.y(j) + (down ? 0 : edge)];
    const part = Math.min(1, (now - leaves(data, i)) / (data.end[j] - leaves(data, i) || 1));
    const [tipX, tipY] = [x + part * (far - x), y + part * (deep - y)];
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = thick;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(tipX, tipY);
    pen.stroke();
    pen.beginPath();
    if (part < 1) {
      pen.arc(tipX, tipY, 4, 0, 2 * Math.PI);
    } else if (head) {
      const angle = Math.atan2(deep - y, far - x);
      for (const turn of [0, 2.75, -2.75])
        pen.lineTo(far + (turn ? 8 * Math.cos(angle + turn) : 0),
                   deep + (turn ? 8 * Math.sin(angle + turn) : 0));
    }
    pen.fill();
  }

  function outline(i, ink) {
    pen.strokeStyle = ink;
    pen.lineWidth = 2.5;
    for (const each of [i, data.other[i]])
      if (each >= 0 && place.rows.has(data.rank[each])) {
        const left = place.x(data.start[each]);
        const wide = Math.max(3, place.x(data.end[each]) - left);
        pen.strokeRect(left, place.y(each), wide, place.strip * 0.94);
      }
  }

  function rule(x, ink) {
    pen.fillStyle = ink;
    pen.fillRect(x - 0.75, 0, 1.5, place.height);
  }

  let said = null;
  function say(i) {
    const text = i < 0 ? "" : `${i}`;
    if (said === text) return;
    said = text;
    about.replaceChildren();
    if (i < 0) return;
    for (const line of told(data, i)) about.append(make("div", "", line));
    const where = data.wheres[data.where[i]];
    if (where) {
      const line = make("div", "", `${where} `), source = data.lines[data.where[i]];
      if (source) line.append(make("code", "", source));
      about.append(line);
    }
  }

  function write() {
    const listed = seen.slice(0, ROWS), made = make("table"), head = make("tr");
    for (const name of [`start (${data.unit})`, `end (${data.unit})`, "event", "waits for", "line"])
      head.append(make("th", "", name));
    made.append(head);
    for (const i of listed) {
      const row = make("tr"), [what] = told(data, i);
      const waits = data.until[i] < 0 ? "" : `rank ${data.waitsFor[i]}`;
      const times = [data.start[i], data.end[i]].map((time) => timeText(data, time));
      for (const cell of [...times, what, waits, data.wheres[data.where[i]]])
        row.append(make("td", "", cell));
      made.append(row);
    }
    const more =
      `The first ${listed.length} of ${seen.length} events. For the others, zoom in or choose ranks.`;
    rowsOf.replaceChildren(...(seen.length > ROWS ? [make("p", "", more)] : []), made);
  }

  function see(next) { view = next; soon(); }

  function zoom(factor, around = null) {
    const middle = held >= 0 ? data.start[held] : (view.from + view.to) / 2;
    const within = middle >= view.from && middle <= view.to;
    see(zoomed(view, factor, around ?? (within ? middle : (view.from + view.to) / 2), data.finish));
  }

  function hold(i) {
    held = i;
    over = -1;
    if (i >= 0 && (data.end[i] < view.from || data.start[i] > view.to)) {
      const middle = (data.start[i] + data.end[i] - view.from - view.to) / 2;
      view = moved(view, middle, data.finish);
    }
    soon();
  }

  function toggle(on = !playing) {
    cancelAnimationFrame(playing);
    playing = 0;
    play.textContent = on ? "❚❚" : "▶";
    play.setAttribute("aria-label", on ? "stop the clock" : "play the clock");
    if (!on) return;
    const begin = performance.now();
    const first = now >= view.to || now < view.from ? view.from : now;
    const step = (moment) => {
      const next = first + ((moment - begin) / 10000) * (view.to - view.from);
      set(next >= view.to ? Infinity : next);
      if (now === Infinity) return toggle(false);
      playing = requestAnimationFrame(step);
    };
    playing = requestAnimationFrame(step);
  }

  function set(time) {
    now = time;
    clock.value = time === Infinity ? 1000 : Math.round((1000 * time) / data.finish);
    soon();
  }

  clock.oninput = () => {
    toggle(false);
    set(Number(clock.value) >= 1000 ? Infinity : (clock.value / 1000) * data.finish);
  };
  choose.oninput = () => {
    const named = ranksIn(choose.value, data.worldSize);
    choose.setAttribute("aria-invalid", named === null);
    if (named !== null) { ranks = named; held = over = -1; soon(); }
  };
  table.ontoggle = soon;

  let drag = null;
  const inside = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.onpointerdown = (event) => {
    drag = { x: event.clientX, view, far: false };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    const [x, y] = inside(event);
    if (drag) {
      const by = place.time(drag.x) - place.time(event.clientX);
      drag.far ||= Math.abs(event.clientX - drag.x) > 4;
      if (drag.far) see(moved(drag.view, by, data.finish));
      return;
    }
    const found = eventAt(data, place, seen, x, y);
    if (found !== over) { over = found; soon(); }
  };
  canvas.onpointerup = (event) => {
    if (drag && !drag.far) hold(eventAt(data, place, seen, ...inside(event)));
    drag = null;
  };
  canvas.onpointercancel = () => (drag = null);
  canvas.onpointerleave = () => { over = -1; soon(); };
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // without it the page scrolls
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), place.time(inside(event)[0]));
  }, { passive: false });

  function beside(step) {
    const own = held < 0 ? ranks[0] : data.rank[held];
    const row = seen.filter((i) => data.rank[i] === own);
    if (held < 0) return row[0] ?? -1;
    const all = [...data.rank.keys()].filter((i) => data.rank[i] === own);
    return all[all.indexOf(held) + step] ?? held;
  }

  function across(step) {
    if (held < 0) return beside(0);
    const rank = ranks[ranks.indexOf(data.rank[held]) + step];
    const off = (i) => Math.abs(data.start[i] - data.start[held]);
    const row = [...data.rank.keys()].filter((i) => data.rank[i] === rank);
    return row.reduce((best, i) => (best < 0 || off(i) < off(best) ? i : best), -1);
  }

  const keys = {
    ArrowLeft: () => hold(beside(-1)), ArrowRight: () => hold(beside(1)),
    ArrowUp: () => { const i = across(-1); if (i >= 0) hold(i); },
    ArrowDown: () => { const i = across(1); if (i >= 0) hold(i); },
    Enter: () => { if (held >= 0 && data.other[held] >= 0) hold(data.other[held]); },
    "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6),
    0: () => see({ from: 0, to: data.finish }), " ": () => toggle(), Escape: () => hold(-1),
  };
  canvas.onkeydown = (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  };
  new ResizeObserver(soon).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  draw();
  return { see, hold, set, state: () => ({ view, held, seen: seen.length, now, place }) };
}

// A fill with matplotlib's hatches: no kind is told by colour alone.
function hatched(color, hatch, pen) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  ink.fillStyle = color;
  ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = ink.fillStyle = "rgba(0, 0, 0, 0.75)";
  const line = (...points) => {
    ink.beginPath();
    ink.moveTo(points[0], points[1]);
    ink.lineTo(points[2], points[3]);
    ink.stroke();
  };
  for (const mark of new Set(hatch)) {
    if (mark === "/" || mark === "x") { line(-2, 10, 10, -2); line(-2, 2, 2, -2); line(6, 10, 10, 6); }
    if (mark === "\\" || mark === "x") { line(-2, -2, 10, 10); line(6, -2, 10, 2); line(-2, 6, 2, 10); }
    if (mark === "-" || mark === "+") line(0, 4, 8, 4);
    if (mark === "+") line(4, 0, 4, 8);
    if (mark === ".") { ink.fillRect(1, 1, 2, 2); ink.fillRect(5, 5, 2, 2); }
  }
  return pen.createPattern(tile, "repeat");
}
