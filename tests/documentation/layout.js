// What a page shows that is cut off, or over something else. Runs in a page beside it, which loads each in a frame.
const MARGIN = 1;
// Letters of neighbouring lines may touch.
const OVERLAP = 3;

function isShown(element) {
  const style = element.ownerDocument.defaultView.getComputedStyle(element);
  return style.visibility !== "hidden" && Number(style.opacity) > 0;
}

// The part of the window in which an element may be seen, and whether the rest of it can be scrolled to.
function clips(view) {
  const known = new Map();
  const whole = { left: 0, top: -Infinity, right: view.innerWidth, bottom: Infinity, scrolls: false };
  return function clip(element) {
    if (!element || element === view.document.documentElement) return whole;
    if (known.has(element)) return known.get(element);
    const style = view.getComputedStyle(element);
    const outer = style.position === "fixed" ? whole : clip(element.parentElement);
    const box = element.getBoundingClientRect();
    const scrolls = ["auto", "scroll"].includes(style.overflowX) || outer.scrolls;
    const found =
      style.overflowX === "visible" && style.overflowY === "visible"
        ? outer
        : {
            left: Math.max(outer.left, box.left),
            top: Math.max(outer.top, box.top),
            right: Math.min(outer.right, box.right),
            bottom: Math.min(outer.bottom, box.bottom),
            scrolls,
          };
    known.set(element, found);
    return found;
  };
}

function texts(view) {
  const document = view.document;
  const clip = clips(view);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    // Pictures place their own texts.
    if (!node.data.trim() || element.closest("script, style, noscript, svg, title") || !isShown(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const area = clip(element);
    // For those who listen, as a button's name.
    if (area.right - area.left <= 2 || area.bottom - area.top <= 2) continue;
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      // Wholly outside: a menu that is put away, or for those who cannot see.
      if (box.right <= area.left || box.left >= area.right || box.bottom <= area.top || box.top >= area.bottom) continue;
      found.push({ element, text: node.data.trim().slice(0, 40), box, area });
    }
  }
  return found;
}

function cut({ text, box, area }) {
  if (area.scrolls) return null;
  const over = Math.max(box.right - area.right, area.left - box.left, box.bottom - area.bottom, area.top - box.top);
  return over > MARGIN ? `cut by ${Math.round(over)} pixels: ${text}` : null;
}

function overlaps(boxes) {
  const found = [];
  boxes.sort((one, other) => one.box.top - other.box.top);
  for (let at = 0; at < boxes.length; at++) {
    const one = boxes[at];
    for (let next = at + 1; next < boxes.length && boxes[next].box.top < one.box.bottom - OVERLAP; next++) {
      const other = boxes[next];
      if (one.element === other.element) continue;
      const inside = (area, edge, pick) => pick(edge.box[area], edge.area[area]);
      const left = Math.max(inside("left", one, Math.max), inside("left", other, Math.max));
      const right = Math.min(inside("right", one, Math.min), inside("right", other, Math.min));
      const top = Math.max(inside("top", one, Math.max), inside("top", other, Math.max));
      const bottom = Math.min(inside("bottom", one, Math.min), inside("bottom", other, Math.min));
      if (right - left > OVERLAP && bottom - top > OVERLAP) found.push(`over each other: ${one.text} | ${other.text}`);
    }
  }
  return found;
}

function faults(view) {
  const root = view.document.documentElement;
  const boxes = texts(view);
  const found = [...boxes.map(cut).filter(Boolean), ...overlaps(boxes)];
  if (root.scrollWidth > view.innerWidth + MARGIN) found.push(`wider than the window: ${root.scrollWidth} pixels`);
  for (const image of view.document.images) {
    if (!image.naturalWidth) found.push(`no picture: ${image.src}`);
  }
  return { faults: [...new Set(found)], texts: boxes.length };
}

async function look(pages, widths) {
  const frame = document.createElement("iframe");
  frame.style.border = "0";
  frame.height = 900;
  document.body.append(frame);
  const results = {};
  for (const page of pages) {
    await new Promise((done) => {
      frame.onload = done;
      frame.src = page;
    });
    await frame.contentDocument.fonts.ready;
    for (const width of widths) {
      frame.width = width;
      results[`${page} at ${width}`] = faults(frame.contentWindow);
    }
  }
  await fetch("/results", { method: "POST", body: JSON.stringify(results) });
}
