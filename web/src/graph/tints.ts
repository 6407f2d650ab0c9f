/**
 * What the colour of a box says: the role of its operators, or how much of the step's time, of the memory that is read
 * and written, or which replica they are of. Pure.
 */
import type { Palette } from "../palette";
import type { GraphDocument } from "../types";
import type { Layout } from "./layout";

export const TINTS = ["role", "time", "memory", "replica"] as const;
export type Tint = (typeof TINTS)[number];

/** Colours of boxes, and how strong each is, 0 to 1; null: that of its share of the time. */
export interface Tints {
  readonly tint: Tint;
  readonly colours: readonly string[];
  readonly strength: Float64Array | null;
}

export const tintOf = (text: string | null): Tint => TINTS.find((one) => one === text) ?? "role";

/** Replicas have these colours in turn; a box with operators of several, or of all, is grey. */
export const replicaColours = ({ accent, bucket }: Palette): readonly string[] => [
  accent,
  bucket.communication,
  bucket.backward,
  bucket.optimize,
];

export function tintsOf(tint: Tint, layout: Layout, document: GraphDocument, palette: Palette): Tints {
  switch (tint) {
    case "role":
      return { tint, colours: layout.boxes.map((box) => palette.bucket[box.group.bucket]), strength: null };
    case "time":
      return { tint, colours: layout.boxes.map(() => palette.accent), strength: null };
    case "memory":
      return { tint, colours: layout.boxes.map(() => palette.accent), strength: byMemory(layout, document) };
    case "replica":
      return { tint, ...byReplica(layout, document, palette) };
  }
}

/** Bytes of a box against those of the largest that is not open. */
function byMemory(layout: Layout, document: GraphDocument): Float64Array {
  const sums = layout.boxes.map((box) => {
    let sum = 0;
    for (const op of box.op?.ops ?? box.group.ops) sum += document.ops[op]?.bytes ?? 0;
    return sum;
  });
  let most = 1;
  layout.boxes.forEach((box, index) => {
    if (!box.expanded) most = Math.max(most, sums[index] ?? 0);
  });
  return Float64Array.from(sums, (sum) => Math.min(1, sum / most));
}

function byReplica(layout: Layout, document: GraphDocument, palette: Palette): Omit<Tints, "tint"> {
  const colours = replicaColours(palette);
  const own = layout.boxes.map((box) => {
    const ops = box.op?.ops ?? box.group.ops;
    const first = document.ops[ops[0] ?? -1]?.replica ?? -1;
    return first >= 0 && ops.every((op) => document.ops[op]?.replica === first) ? first : -1;
  });
  return {
    colours: own.map((replica) => (replica < 0 ? palette.muted : (colours[replica % colours.length] ?? palette.muted))),
    strength: Float64Array.from(own, (replica) => (replica < 0 ? 0 : 0.5)),
  };
}
