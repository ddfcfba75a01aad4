// Cuts each section into slides that fit the screen, and shows one at a time.
const main = document.querySelector("main");
const sections = [...main.children].map((section) => ({
  id: section.id,
  title: section.classList.contains("title"),
  heading: section.querySelector("h2"),
  blocks: [...section.querySelectorAll(".block")],
}));
const count = document.querySelector(".where output");
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
// Units by which text may be too long for its slide: it is shown a little smaller.
const SQUEEZED = 2.5;
let slides = [];
let at = 0;

function newSlide(section, again) {
  const slide = document.createElement("section");
  slide.className = section.title && !again ? "slide title" : again ? "slide again" : "slide";
  if (!again) slide.id = section.id;
  slide.append(again ? section.heading.cloneNode(true) : section.heading);
  const body = document.createElement("div");
  body.className = "body";
  slide.append(body);
  main.append(slide);
  slides.push(slide);
  return body;
}

const is = (block, ...kinds) => kinds.some((kind) => block?.classList.contains(kind));

// Units of height that what is on the slide leaves free; less than none: it does not fit.
function room(body) {
  const slide = body.parentElement;
  const low = slide.getBoundingClientRect().bottom - 2.2 * rem();
  return (low - body.getBoundingClientRect().bottom) / rem();
}

// What is still too large for its slide is shown smaller; a line that is much too wide is broken.
function fit(body) {
  for (const block of body.querySelectorAll(".block")) {
    const wide = Math.max(...[...block.querySelectorAll("pre, table, math")].map(
      (each) => each.scrollWidth / block.clientWidth), 1);
    if (wide > 1) block.style.zoom = Math.max(0.75, 0.99 / wide);
  }
  body.style.zoom = 1;
  for (let turn = 0; turn < 5 && room(body) < 0; turn++) {
    const high = body.getBoundingClientRect().height;
    body.style.zoom = Math.max(0.4, (0.99 * body.style.zoom * (high + room(body) * rem())) / high);
  }
}

// A figure under sliders is as large as its slide allows. A timeline's canvas keeps its size: where
// the pointer is, it finds in pixels of the screen.
function enlarge(block) {
  const body = block.parentElement;
  if (!block.querySelector(".course-explore")) return;
  for (let size = 2; size >= 0.5; size -= 0.1) {
    block.style.zoom = size;
    const still = [...block.querySelectorAll("svg, img")].map((each) => each.clientWidth / size);
    if (room(body) >= 0 && Math.max(0, ...still) <= block.clientWidth) return;
  }
}

function cut() {
  const first = slides[at]?.querySelector(".block");
  document.body.classList.add("cut");
  for (const block of sections.flatMap((section) => section.blocks)) {
    block.remove();
    block.style.zoom = "";
  }
  main.replaceChildren();
  slides = [];
  for (const section of sections) {
    let body = newSlide(section, false);
    let before = null;
    for (const block of section.blocks) {
      const begins = is(block, "figure", "live", "folded") || is(before, "question", "guess");
      if (begins && before) body = newSlide(section, true);
      body.append(block);
      if (room(body) < (is(block, "text") ? -SQUEEZED : 0) && body.children.length > 1) {
        // A question takes along the sentence that leads to it.
        const along = is(block, "question", "guess") && is(before, "text") ? [before] : [];
        body = body.children.length > 1 + along.length ? newSlide(section, true) : body;
        body.append(...along, block);
      }
      before = block;
    }
  }
  for (const slide of slides) fit(slide.querySelector(".body"));
  const place = slides.findIndex((slide) => slide.contains(first));
  show(place < 0 ? here() : place);
}

function here() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (!name) return 0;
  const number = name.match(/^\/(\d+)$/);
  if (number) return Number(number[1]) - 1;
  return Math.max(0, slides.findIndex((slide) => slide.id === name));
}

function show(number) {
  at = Math.min(Math.max(number, 0), slides.length - 1);
  slides.forEach((slide, place) => {
    slide.classList.toggle("shown", place === at);
    slide.inert = place !== at;
  });
  count.textContent = `${at + 1} / ${slides.length}`;
  history.replaceState(null, "", `#/${at + 1}`);
  slides[at].querySelectorAll(".live").forEach(enlarge);
}

const moves = {
  ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1,
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest?.("input, select, textarea, canvas")) return; // a figure that is moved
  if (event.key === " " && event.target.closest?.("button, summary, a")) return;
  if (event.key in moves) show(at + (event.shiftKey ? -1 : 1) * moves[event.key]);
  else if (event.key === "Home") show(0);
  else if (event.key === "End") show(slides.length - 1);
  else if (event.key === "n") {
    document.body.classList.toggle("full");
    cut();
  } else return;
  event.preventDefault();
});
addEventListener("hashchange", () => show(here()));
addEventListener("resize", () => show(at));
document.querySelector(".back").addEventListener("click", () => show(at - 1));
document.querySelector(".on").addEventListener("click", () => show(at + 1));

// A picture has its size once it is read. A small one is enlarged, but not until it blurs.
await Promise.all([...document.images].map((image) => image.decode().catch(() => null)));
for (const image of document.querySelectorAll(".block.figure img")) {
  image.style.setProperty("--wide", `${Math.min(1.5 * image.naturalWidth, 1150) / 20}rem`);
  image.style.setProperty("object-fit", "contain");
}
cut();
const grown = new ResizeObserver(() => slides[at].querySelectorAll(".live").forEach(enlarge));
document.querySelectorAll(".live .course-explore").forEach((each) => grown.observe(each));
document.documentElement.dataset.ready = slides.length;
