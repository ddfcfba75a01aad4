// A figure under sliders: of drawings that were made before (_explore.py), one is shown.

// The place of the drawing for these positions of the sliders: the last slider runs fastest.
export function place(data, at) {
  return data.sliders.reduce((found, slider, i) => found * slider.values.length + at[i], 0);
}

export async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

export async function mount(root, data) {
  const [hatches, ...drawings] = await unpack(data.drawings), at = [...data.at];
  const defined = document.createElement("div");
  // Not hidden by display: none, which would take the hatches from the drawings.
  defined.innerHTML = `<svg width="0" height="0" style="position: absolute"><defs>${hatches}</defs></svg>`;
  const picture = document.createElement("div"), words = document.createElement("div");
  picture.className = "picture";
  words.className = "words";
  words.setAttribute("aria-live", "polite");
  const made = data.sliders.map((slider, i) => {
    const bar = document.createElement("label"), name = document.createElement("span");
    const input = document.createElement(slider.choice ? "select" : "input");
    const told = document.createElement("output");
    bar.className = "bar";
    name.textContent = slider.name;
    input.dataset.lmSuppressShortcuts = "true";  // or JupyterLab takes the arrow keys
    if (slider.choice) input.append(...slider.values.map((value, j) => new Option(value, j)));
    else Object.assign(input, { type: "range", min: 0, max: slider.values.length - 1 });
    input.oninput = () => { at[i] = Number(input.value); draw(); };
    bar.append(name, input, ...(slider.choice ? [] : [told]));
    return { bar, input, told };
  });

  // Where nothing more changes, a slider ends; a list keeps all its choices.
  function end(i) {
    if (data.sliders[i].choice) return data.sliders[i].values.length - 1;
    const shown = (value) => drawings[place(data, Object.assign([...at], { [i]: value }))];
    let last = data.sliders[i].values.length - 1;
    while (last > 0 && shown(last) === shown(last - 1)) last -= 1;
    return last;
  }

  function draw() {
    made.forEach(({ input }, i) => { input.max = end(i); at[i] = Math.min(at[i], input.max); });
    const number = place(data, at);
    picture.innerHTML = drawings[number];
    const svg = picture.querySelector("svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", data.words[number]);
    words.textContent = data.words[number];
    made.forEach(({ input, told }, i) => {
      const value = data.sliders[i].values[at[i]];
      input.value = at[i];
      input.setAttribute("aria-valuetext", value);
      told.textContent = value;
    });
  }

  if (data.play >= 0) {
    const { bar } = made[data.play], button = document.createElement("button");
    let clock = 0;
    const stop = () => { clearInterval(clock); clock = 0; button.textContent = "play"; };
    const step = () => {
      if (!root.isConnected) return stop();
      at[data.play] += 1;
      draw();
      if (at[data.play] === end(data.play)) stop();
    };
    button.type = "button";
    button.textContent = "play";
    button.onclick = (event) => {
      event.preventDefault();
      if (clock) return stop();
      if (at[data.play] === end(data.play)) { at[data.play] = 0; draw(); }
      clock = setInterval(step, 700);
      button.textContent = "stop";
    };
    bar.append(button);
  }
  root.querySelector("img").remove();
  root.prepend(...made.map(({ bar }) => bar), words, picture, defined);
  draw();
}
