/**
 * The one owner of requestAnimationFrame.
 *
 * A painter runs only after `invalidate`, or while it keeps answering "again"; when nothing happens no frame
 * is requested, and a hidden tab paints nothing because the browser gives it no frames.
 */

export type Again = "again" | "done";
export type Painter = (nowMs: number) => Again;

const painters = new Set<Painter>();
const dirty = new Set<Painter>();
let scheduled = false;

/** Add a painter and ask for its first frame; call the result to remove it. */
export function addPainter(painter: Painter): () => void {
  painters.add(painter);
  invalidate(painter);
  return () => {
    painters.delete(painter);
    dirty.delete(painter);
  };
}

/** Paint again when a browser that was short of memory gives a canvas back empty; call the result to stop. */
export function paintWhenRestored(canvas: HTMLCanvasElement, painter: Painter): () => void {
  const restored = () => invalidate(painter);
  canvas.addEventListener("contextrestored", restored);
  return () => canvas.removeEventListener("contextrestored", restored);
}

export function invalidate(painter: Painter): void {
  if (!painters.has(painter)) return;
  dirty.add(painter);
  schedule();
}

export function invalidateAll(): void {
  for (const painter of painters) dirty.add(painter);
  if (dirty.size > 0) schedule();
}

function schedule(): void {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(tick);
}

function tick(nowMs: number): void {
  scheduled = false;
  const due = [...dirty];
  dirty.clear();
  for (const painter of due) {
    if (painters.has(painter) && painter(nowMs) === "again") dirty.add(painter);
  }
  if (dirty.size > 0) schedule();
}

/**
 * Run `publish` at most once in `periodMs` however often the result is called, the last call never lost.
 * A timer rather than a frame, so that text for screen readers stays current in a tab that is not painted.
 */
export function throttled(periodMs: number, publish: () => void): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let last = Number.NEGATIVE_INFINITY;
  const fire = () => {
    timer = undefined;
    last = performance.now();
    publish();
  };
  return () => {
    if (timer !== undefined) return;
    const wait = Math.max(0, last + periodMs - performance.now());
    timer = setTimeout(fire, wait);
  };
}
