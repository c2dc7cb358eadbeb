// A drawing that can be moved and made larger: by dragging, the wheel with Ctrl, two fingers, the
// buttons, and with the keyboard. <div data-panzoom><svg viewBox>…</svg></div>
const LEAST = 0.15;
const MOST = 3;
const READABLE = 0.62;

class Pane {
  constructor(place) {
    this.place = place;
    this.svg = place.querySelector("svg");
    const [, , width, height] = this.svg.getAttribute("viewBox").split(" ").map(Number);
    this.size = { width, height };
    this.view = { x: 0, y: 0, scale: 1 };
    this.fingers = new Map();
    this.isMoved = false;
    place.addEventListener("pointerdown", (event) => this.down(event));
    place.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) place.addEventListener(name, (event) => this.up(event));
    place.addEventListener("click", (event) => { if (this.isMoved) { event.preventDefault(); event.stopPropagation(); } }, true);
    place.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    place.addEventListener("keydown", (event) => this.press(event));
    place.addEventListener("focusin", (event) => this.show(event.target));
    for (const button of place.parentElement.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => this.button(button.dataset.zoom));
    }
    new ResizeObserver(() => { if (!this.isTouched) this.fit(); else this.apply(); }).observe(place);
    this.fit();
  }

  // Everything, if that is asked for; otherwise as much as can be read.
  fit(least = READABLE) {
    const width = this.place.clientWidth;
    const room = Math.min(Math.max(300, innerHeight * 0.62), 760);
    const all = Math.min(width / this.size.width, room / this.size.height);
    // What cannot be read is no use: then it begins at its beginning, and can be moved.
    const scale = Math.min(1.1, Math.max(least, all));
    const height = Math.min(room, Math.max(260, this.size.height * scale));
    this.place.style.height = `${height}px`;
    const within = (size, room) => (size <= room ? (room - size) / 2 : 0);
    this.view = { scale, x: within(this.size.width * scale, width), y: within(this.size.height * scale, height) };
    this.apply();
  }

  apply() {
    const { x, y, scale } = this.view;
    this.svg.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
  }

  zoom(factor, at) {
    const scale = Math.min(MOST, Math.max(LEAST, this.view.scale * factor));
    const ratio = scale / this.view.scale;
    this.view = { scale, x: at.x - (at.x - this.view.x) * ratio, y: at.y - (at.y - this.view.y) * ratio };
    this.isTouched = true;
    this.apply();
  }

  at(event) {
    const box = this.place.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  middle() {
    return { x: this.place.clientWidth / 2, y: this.place.clientHeight / 2 };
  }

  down(event) {
    if (event.button !== 0) return;
    this.fingers.set(event.pointerId, this.at(event));
    this.isMoved = false;
  }

  move(event) {
    const before = this.fingers.get(event.pointerId);
    if (!before) return;
    const now = this.at(event);
    const others = [...this.fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    if (others.length) {
      const other = others[0];
      const apart = (a) => Math.hypot(a.x - other.x, a.y - other.y) || 1;
      this.zoom(apart(now) / apart(before), other);
    } else {
      if (!this.isMoved && Math.hypot(now.x - before.x, now.y - before.y) < 4) return;
      if (!this.isMoved) this.place.setPointerCapture(event.pointerId);
      this.view.x += now.x - before.x;
      this.view.y += now.y - before.y;
      this.apply();
    }
    this.isMoved = this.isTouched = true;
    this.fingers.set(event.pointerId, now);
  }

  up(event) {
    this.fingers.delete(event.pointerId);
    setTimeout(() => { this.isMoved = false; });
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY / 300), this.at(event));
  }

  press(event) {
    if (event.target !== this.place) return;
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (step) {
      this.view.x += step[0];
      this.view.y += step[1];
      this.isTouched = true;
      this.apply();
    } else if (event.key === "+" || event.key === "=") this.zoom(1.25, this.middle());
    else if (event.key === "-") this.zoom(0.8, this.middle());
    else if (event.key === "0") this.button("fit");
    else return;
    event.preventDefault();
  }

  button(what) {
    if (what === "fit") {
      this.fit(LEAST);
      // It stays so when its frame becomes another.
      this.isTouched = true;
    } else this.zoom(what === "in" ? 1.25 : 0.8, this.middle());
  }

  show(element) {
    if (element === this.place || !element.getBoundingClientRect) return;
    const box = element.getBoundingClientRect();
    const ours = this.place.getBoundingClientRect();
    const dx = box.left < ours.left ? ours.left - box.left + 20 : box.right > ours.right ? ours.right - box.right - 20 : 0;
    const dy = box.top < ours.top ? ours.top - box.top + 20 : box.bottom > ours.bottom ? ours.bottom - box.bottom - 20 : 0;
    if (!dx && !dy) return;
    this.view.x += dx;
    this.view.y += dy;
    this.isTouched = true;
    this.apply();
  }
}

for (const place of document.querySelectorAll("[data-panzoom]")) new Pane(place);
