/**
 * Where one looks at a graph from, as an address has it: the middle of the canvas as shares of the layout's width and
 * height, and the zoom; so a window of another size shows the same place. Pure.
 */
import { MAX_SCALE, MIN_SCALE } from "./camera";
import { everyGroup, type Group } from "./group";
import type { Layout } from "./layout";
import type { Camera } from "./scene";

export interface Viewpoint {
  readonly x: number;
  readonly y: number;
  readonly zoom: number;
}

/** Opened modules that an address names one by one; "all" is one word. */
const MOST_OPENED = 32;
const ALL = "all";
const DIGITS = 4;

export function viewpointOf(layout: Layout, camera: Camera, w: number, h: number): Viewpoint {
  const { x, y, scale } = camera;
  const at = (middle: number, size: number) => (size > 0 ? middle / scale / size : 0);
  return { x: at(w / 2 - x, layout.width), y: at(h / 2 - y, layout.height), zoom: scale };
}

export function cameraAt(layout: Layout, view: Viewpoint, w: number, h: number): Camera {
  const scale = Math.min(MAX_SCALE, Math.max(MIN_SCALE, view.zoom));
  return { scale, x: w / 2 - view.x * layout.width * scale, y: h / 2 - view.y * layout.height * scale };
}

/** "0.4213,0.3077,1.25". */
export const viewpointText = ({ x, y, zoom }: Viewpoint): string =>
  `${Number(x.toFixed(DIGITS))},${Number(y.toFixed(DIGITS))},${Number(zoom.toPrecision(DIGITS))}`;

/** Null for what is no viewpoint, such as a link that was cut off. */
export function viewpointFrom(text: string | null): Viewpoint | null {
  const parts = (text ?? "").split(",");
  const [x, y, zoom] = parts.map((part) => (part.trim() === "" ? Number.NaN : Number(part)));
  if (parts.length !== 3 || x === undefined || y === undefined || zoom === undefined) return null;
  return Number.isFinite(x) && Number.isFinite(y) && Number.isFinite(zoom) && zoom > 0 ? { x, y, zoom } : null;
}

/** The opened modules as an address has them; null: none, or too many to name. */
export function openedText(expanded: ReadonlySet<string>, groups: readonly Group[]): string | null {
  if (expanded.size === 0) return null;
  const known = everyGroup(groups);
  if (known.length > 0 && known.every((group) => expanded.has(group.id))) return ALL;
  return expanded.size > MOST_OPENED ? null : JSON.stringify([...expanded]);
}

/** The modules that an address opens; null for what names none, such as a link that was cut off. */
export function openedFrom(text: string | null): readonly string[] | typeof ALL | null {
  if (text === null || text === ALL) return text ?? [];
  try {
    const found: unknown = JSON.parse(text);
    if (!Array.isArray(found)) return null;
    return found.filter((id): id is string => typeof id === "string").slice(0, MOST_OPENED);
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}
