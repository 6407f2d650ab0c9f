/** The colours of the style sheet, for canvases. Read again when the theme changes; tokens.css is the one source. */
import type { Bucket } from "./graph/group";
import { theme } from "./store/session";

export interface Palette {
  readonly bg: string;
  readonly surface: string;
  readonly raised: string;
  readonly line: string;
  readonly edge: string;
  readonly text: string;
  readonly muted: string;
  readonly faint: string;
  readonly accent: string;
  readonly critical: string;
  readonly bad: string;
  readonly onFill: string;
  readonly sans: string;
  readonly mono: string;
  readonly bucket: Readonly<Record<Bucket, string>>;
}

let cached: { readonly of: string; readonly palette: Palette } | null = null;

export function palette(): Palette {
  if (cached?.of === theme.value) return cached.palette;
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  const made: Palette = {
    bg: read("bg"),
    surface: read("surface"),
    raised: read("raised"),
    line: read("line"),
    edge: read("edge"),
    text: read("text"),
    muted: read("muted"),
    faint: read("faint"),
    accent: read("accent"),
    critical: read("critical"),
    bad: read("bad"),
    onFill: read("on-fill"),
    sans: read("sans"),
    mono: read("mono"),
    bucket: {
      forward: read("fwd"),
      backward: read("bwd"),
      optimize: read("opt"),
      communication: read("comm"),
      input: read("input"),
    },
  };
  cached = { of: theme.value, palette: made };
  return made;
}

const mixed = new Map<string, string>();
/** Far more than a theme and the levels of a glow have. */
const MOST_MIXED = 4096;

/** `colour` (#rrggbb) with an alpha; canvases have no color-mix. A canvas asks some 20,000 times a frame. */
export function alpha(colour: string, opacity: number): string {
  const key = colour + opacity;
  let found = mixed.get(key);
  if (found === undefined) {
    found = withAlpha(colour, opacity);
    if (mixed.size >= MOST_MIXED) mixed.clear();
    mixed.set(key, found);
  }
  return found;
}

function withAlpha(colour: string, opacity: number): string {
  const hex = colour.slice(1);
  const part = (at: number) => Number.parseInt(hex.slice(at, at + 2), 16);
  return `rgba(${part(0)},${part(2)},${part(4)},${opacity})`;
}
