/**
 * What the colour of a box says: the role of its operators, or how much of the step's time, of the memory that is read
 * and written, how old the parameters are that they read, or which replica they are of; before and after a pass, what it does to them. Pure.
 */
import { compact } from "../format";
import type { Palette } from "../palette";
import { type Behind, behindAt } from "../store/staleness";
import type { GraphDocument } from "../types";
import type { Layout } from "./layout";
import { type Mark, markOf } from "./stages";

export const TINTS = ["role", "time", "memory", "replica", "staleness"] as const;
export type Tint = (typeof TINTS)[number];

/** Colours of boxes, and how strong each is, 0 to 1; null: that of its share of the time. */
export interface Tints {
  readonly tint: Tint | "pass";
  readonly colours: readonly string[];
  readonly strength: Float64Array | null;
  /** What stands on the right of a box, in place of its share of the time. */
  readonly notes?: readonly string[];
}

export const tintOf = (text: string | null): Tint => TINTS.find((one) => one === text) ?? "role";

/** Replicas have these colours in turn; a box with operators of several, or of all, is grey. */
export const replicaColours = ({ accent, bucket }: Palette): readonly string[] => [
  accent,
  bucket.communication,
  bucket.backward,
  bucket.optimize,
];

export function tintsOf(
  tint: Tint,
  layout: Layout,
  document: GraphDocument,
  palette: Palette,
  behind: Behind = new Map(),
): Tints {
  switch (tint) {
    case "role":
      return { tint, colours: layout.boxes.map((box) => palette.bucket[box.group.bucket]), strength: null };
    case "time":
      return { tint, colours: layout.boxes.map(() => palette.accent), strength: null };
    case "memory":
      return { tint, colours: layout.boxes.map(() => palette.accent), strength: byMemory(layout, document) };
    case "replica":
      return { tint, ...byReplica(layout, document, palette) };
    case "staleness":
      return { tint, ...byStaleness(layout, document, palette, behind) };
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

/** The number of updates that the deepest colour stands for: that of the oldest parameter, at least 1. */
export const mostBehind = (behind: Behind): number => Math.max(1, ...behind.values());

/** Grey: what reads no parameter of which a server has counted pushes. */
function byStaleness(layout: Layout, document: GraphDocument, palette: Palette, behind: Behind): Omit<Tints, "tint"> {
  const most = mostBehind(behind);
  const found = layout.boxes.map((box) => behindAt(document, box.op?.ops ?? box.group.ops, behind));
  return {
    colours: found.map((one) => (Number.isNaN(one) ? palette.muted : palette.bucket.communication)),
    strength: Float64Array.from(found, (one) => (Number.isNaN(one) ? 0 : one / most)),
    notes: found.map((one) => (Number.isNaN(one) ? "" : compact(one))),
  };
}

/** A sign beside the colour, for those who do not see it. */
export const SIGN: Readonly<Record<Mark, string>> = { same: "", removed: "−", added: "+", changed: "~" };

export const markColour = (mark: Mark, { bad, bucket, muted }: Palette): string =>
  ({ same: muted, removed: bad, added: bucket.optimize, changed: bucket.communication })[mark];

/** The least strength of a box of which a pass touches anything. */
const LEAST_TOUCHED = 0.12;

/** Boxes before or after a pass: coloured where it touches operators, as strong as it touches many of them. */
export function tintsOfPass(layout: Layout, marks: Uint8Array, palette: Palette): Tints {
  const found = layout.boxes.map((box) => {
    const ops = box.op?.ops ?? box.group.ops;
    return { ...markOf(marks, ops), ops };
  });
  return {
    tint: "pass",
    colours: found.map(({ mark }) => markColour(mark, palette)),
    strength: Float64Array.from(found, ({ part }) => (part === 0 ? 0 : Math.max(LEAST_TOUCHED, part))),
    notes: found.map(({ mark, part, ops }) => (part === 0 ? "" : `${SIGN[mark]}${Math.round(part * ops.length)}`)),
  };
}
