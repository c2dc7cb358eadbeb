// The partitions of a dataset as a heat map on a canvas: state by colour and form, age or rows by
// shade. The cells are read from the page of the partitions, once and when their digest changes.
// With the keyboard: arrows, Home, End, Page Up and Down, Enter. The table there is the same in words.
import { age } from "./times.js";

const GAP = 2;
const LEVELS = 6;
const WORDS = { published: "published", queued: "task waiting", running: "task running", retrying: "task retrying", dead: "task dead", missing: "missing, no task" };
const COLOURS = { published: "--completed", queued: "--queued", running: "--running", retrying: "--retrying", dead: "--dead", missing: "--retrying" };

function edge(count) {
  return count <= 300 ? 22 : count <= 2000 ? 14 : 10;
}

// Levels of shade, 0 to 5: for each value how strong it is among all.
function levels(values, isStrongSmall) {
  const known = values.filter((each) => each !== null);
  const most = Math.log1p(known.reduce((a, b) => Math.max(a, b), 0));
  const least = Math.log1p(known.reduce((a, b) => Math.min(a, b), Infinity));
  const span = most - least;
  return values.map((each) => {
    if (each === null) return 2;
    const share = span > 0 ? (Math.log1p(each) - least) / span : 1;
    return Math.round((isStrongSmall && span > 0 ? 1 - share : share) * (LEVELS - 1));
  });
}

class Heat {
  constructor(place) {
    this.place = place;
    this.frame = place.querySelector("[data-frame]");
    this.canvas = place.querySelector("[data-canvas]");
    this.mark = place.querySelector("[data-mark]");
    this.told = place.querySelector("[data-told]");
    this.shade = place.querySelector("[data-shade]");
    this.cells = { names: [], keys: [], states: [], rows: [], ages: [], tasks: {}, leftOut: 0 };
    this.at = -1;
    this.digest = "";
    this.fetchedAt = 0;
    this.frame.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") this.choose(this.under(event)); });
    this.frame.addEventListener("click", (event) => { this.choose(this.under(event)); this.open(); });
    this.frame.addEventListener("keydown", (event) => this.press(event));
    this.frame.addEventListener("focus", () => { if (this.at < 0) this.choose(this.cells.keys.length - 1); });
    this.shade.addEventListener("change", () => this.draw());
    place.addEventListener("penstock:update", () => this.look());
    document.addEventListener("penstock:theme", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => { if (this.frame.clientWidth !== this.width) this.draw(); }).observe(this.frame);
    this.look();
  }

  // Read the cells again if they are others now; large maps less often.
  look() {
    const digest = this.place.querySelector("[data-digest]").dataset.digest;
    if (digest === this.digest || this.timer) return;
    const pace = this.cells.keys.length > 2000 ? 5000 : 2000;
    const wait = this.fetchedAt ? Math.max(0, this.fetchedAt + pace - performance.now()) : 0;
    this.timer = setTimeout(async () => {
      try {
        this.digest = this.place.querySelector("[data-digest]").dataset.digest;
        await this.read();
      } catch {
        this.digest = "";
        this.told.textContent = "Failed to read the partitions.";
      }
      this.fetchedAt = performance.now();
      this.timer = 0;
      this.look();
    }, wait);
  }

  async read() {
    const source = this.place.dataset.heat;
    const answer = await fetch(source + (source.includes("?") ? "&" : "?") + "cells=1");
    if (!answer.ok) throw new Error();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const chosen = this.cells.keys[this.at];
    this.cells = JSON.parse(page.querySelector("script[data-cells]").textContent);
    this.at = chosen === undefined ? -1 : this.cells.keys.indexOf(chosen);
    this.draw();
    // The newest are at the end.
    if (!this.fetchedAt) this.frame.scrollTop = this.frame.scrollHeight;
    if (this.at < 0) this.summary();
  }

  draw() {
    const { keys, states, rows, ages, names } = this.cells;
    this.width = this.frame.clientWidth;
    this.edge = edge(keys.length);
    this.across = Math.max(1, Math.floor((this.width - 4) / (this.edge + GAP)));
    const height = Math.max(1, Math.ceil(keys.length / this.across)) * (this.edge + GAP);
    const width = this.across * (this.edge + GAP);
    const scale = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colours = names.map((name) => style.getPropertyValue(COLOURS[name]).trim());
    const shades = this.shade.value === "rows" ? levels(rows, false) : levels(ages, true);
    const size = this.edge;
    this.ground = getComputedStyle(this.frame).backgroundColor;
    for (let place = 0; place < keys.length; place++) {
      const x = (place % this.across) * (size + GAP);
      const y = Math.floor(place / this.across) * (size + GAP);
      const name = names[states[place]];
      pen.fillStyle = pen.strokeStyle = colours[states[place]];
      if (name === "published") {
        pen.globalAlpha = 0.22 + 0.78 * (shades[place] / (LEVELS - 1));
        pen.fillRect(x, y, size, size);
        pen.globalAlpha = 1;
      } else this.form(pen, name, x, y, size);
    }
    this.show();
  }

  // States have forms of their own, for those who do not see colours.
  form(pen, name, x, y, size) {
    pen.lineWidth = size > 12 ? 2 : 1.5;
    const inset = pen.lineWidth / 2;
    if (name === "dead") {
      pen.fillRect(x, y, size, size);
      pen.strokeStyle = this.ground;
      const from = size * 0.28;
      const to = size - from;
      pen.beginPath();
      pen.moveTo(x + from, y + from);
      pen.lineTo(x + to, y + to);
      pen.moveTo(x + to, y + from);
      pen.lineTo(x + from, y + to);
      pen.stroke();
      return;
    }
    pen.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    if (name === "running") pen.fillRect(x, y + size / 2, size, size / 2);
    if (name === "retrying") pen.fillRect(x, y, size / 2, size);
    if (name === "queued") pen.fillRect(x + size * 0.35, y + size * 0.35, size * 0.3, size * 0.3);
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / (this.edge + GAP));
    const row = Math.floor((event.clientY - box.top) / (this.edge + GAP));
    const place = row * this.across + column;
    return column >= 0 && column < this.across && place < this.cells.keys.length ? place : -1;
  }

  choose(place) {
    if (place < 0 || place === this.at) return;
    this.at = place;
    this.show();
    const { keys, states, rows, ages, names, tasks } = this.cells;
    const name = names[states[place]];
    const parts = [keys[place] || "all of it"];
    if (name !== "published" || ages[place] === null) parts.push(WORDS[name]);
    if (rows[place] !== null) parts.push(`${rows[place].toLocaleString("en")} ${rows[place] === 1 ? "row" : "rows"}`);
    if (ages[place] !== null) parts.push(`published ${age(ages[place] + (performance.now() - this.fetchedAt) / 1000)}`);
    if (tasks[place]) parts.push(`task ${tasks[place]}`);
    this.told.textContent = parts.join(" · ");
  }

  show() {
    this.mark.hidden = this.at < 0;
    if (this.at < 0) return;
    const x = (this.at % this.across) * (this.edge + GAP) + 2;
    const y = Math.floor(this.at / this.across) * (this.edge + GAP) + 2;
    Object.assign(this.mark.style, { left: `${x}px`, top: `${y}px`, width: `${this.edge}px`, height: `${this.edge}px` });
  }

  summary() {
    const { keys, leftOut } = this.cells;
    if (!keys.length) this.told.textContent = "There are no partitions yet.";
    else {
      const cut = leftOut ? ` Only the newest ${keys.length.toLocaleString("en")} are drawn; the table has all.` : "";
      this.told.textContent = `From ${keys[0] || "all of it"} to ${keys[keys.length - 1] || "all of it"}.${cut}`;
    }
  }

  press(event) {
    const count = this.cells.keys.length;
    if (!count) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.across, ArrowDown: this.across, PageUp: -10 * this.across, PageDown: 10 * this.across, Home: -count, End: count };
    if (event.key === "Enter") this.open();
    else if (event.key in steps) {
      this.choose(Math.min(count - 1, Math.max(0, this.at + steps[event.key])));
      this.mark.scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
  }

  open() {
    const key = this.cells.keys[this.at];
    if (key === undefined) return;
    const base = `/datasets/${encodeURIComponent(this.place.dataset.name)}`;
    const query = new URLSearchParams();
    // What browsers take for a way to another folder cannot stand in a path.
    const isOdd = ["", ".", ".."].includes(key);
    if (isOdd && key) query.set("key", key);
    if (this.place.dataset.generation) query.set("generation", this.place.dataset.generation);
    const path = isOdd ? `${base}/partition` : `${base}/partitions/${encodeURIComponent(key)}`;
    location.assign(query.size ? `${path}?${query}` : path);
  }
}

for (const place of document.querySelectorAll("[data-heat]")) new Heat(place);
