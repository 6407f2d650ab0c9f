/**
 * Where boxes stand. Forward runs left to right on top; backward comes back right to left beneath it, each
 * module under its forward half; exchange and updates stand under the gradients that they take. Within a band
 * columns come from longest paths, rows from barycentres. O(V + E) but for the edge reduction; deterministic.
 */
import type { GraphDocument } from "../types";
import { OP_H, OP_W, placeCells } from "./cells";
import { placeDown } from "./down";
import { bandOf, type Group, type LogicalOp } from "./group";
import { topological } from "./topology";

export interface Box {
  readonly id: string;
  readonly group: Group;
  /** Set for an operator inside an expanded group. */
  readonly op: LogicalOp | null;
  readonly expanded: boolean;
  /** The box of the group that it is inside of, -1 for none, and how many are around it. */
  readonly parent: number;
  readonly depth: number;
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Edge {
  readonly from: number;
  readonly to: number;
  /** Follows from other edges; drawn only for the box that is selected. */
  readonly implied: boolean;
}

export interface Layout {
  readonly boxes: readonly Box[];
  readonly edges: readonly Edge[];
  /** Box of each operator index (the innermost), -1 if hidden. */
  readonly boxOfOp: Int32Array;
  readonly groupBoxOfOp: Int32Array;
  readonly width: number;
  readonly height: number;
  /** Made for a narrow page: as wide as the page, and as high as it needs. */
  readonly down: boolean;
}

/** Where a graph will be seen. `aspect`: width over height; a tall place gets taller boxes, then wider gaps. */
export interface Place {
  readonly aspect: number;
  readonly down: boolean;
}
const ANYWHERE: Place = { aspect: Number.POSITIVE_INFINITY, down: false };

const GAP_X = 24;
const GAP_Y = 16;
const BAND_GAP = 34;
const MAX_BAND_GAP = 130;
const BOX_H = 42;
const MAX_BOX_H = 72;
/** How much of spare height goes into boxes before gaps get the rest. */
const BOX_SHARE = 0.8;
/** A long chain, such as the steps of an optimizer, is folded into rows of this many columns. */
const FOLD = 4;
const MAX_ROWS = 10;
const REDUCE_LIMIT = 600;

type Pairs = readonly (readonly [number, number])[];
/** Box of an operator; -1 or absent: none. */
type Owner = Int32Array | ReadonlyMap<number, number>;

interface Links {
  readonly preds: readonly number[][];
  readonly succs: readonly number[][];
}

export function layoutGraph(
  document: GraphDocument,
  groups: readonly Group[],
  expanded: ReadonlySet<string>,
  place: Place = ANYWHERE,
): Layout {
  const n = document.ops.length;
  const groupOfOp = ownerOf(n, groups);
  const order = topological(document);
  const links = linksBetween(document.edges, groupOfOp, groups.length, order);
  const boxes: Box[] = groups.map((group) => sizedBox(group, expanded.has(group.id)));
  const within = edgesWithin(document, groups, groupOfOp, expanded);
  const inner = groups.map((group, index) =>
    expanded.has(group.id)
      ? placeInside(group, boxes[index] as Box, within[index] ?? [], {
          order,
          expanded,
          fold: place.down ? 1 : FOLD,
        })
      : null,
  );
  const columns = columnsOf(groups, links);
  const size = place.down
    ? placeDown(boxes, groups, columns)
    : placeAcross(boxes, groups, columns, links, place.aspect);
  const edges = reduceEdges(links);
  const boxOfOp = groupOfOp.slice();
  inner.forEach((inside, index) => {
    addInside(index, inside, boxes, edges, boxOfOp);
  });
  return { boxes, edges, boxOfOp, groupBoxOfOp: groupOfOp, down: place.down, ...size };
}

function ownerOf(n: number, groups: readonly Group[]): Int32Array {
  const owner = new Int32Array(n).fill(-1);
  groups.forEach((group, index) => {
    for (const op of group.ops) owner[op] = index;
  });
  return owner;
}

/** Edges between operators of one expanded group, by group. */
function edgesWithin(
  document: GraphDocument,
  groups: readonly Group[],
  owner: Int32Array,
  expanded: ReadonlySet<string>,
): Pairs[] {
  const found: (readonly [number, number])[][] = groups.map(() => []);
  if (expanded.size === 0) return found;
  for (const edge of document.edges) {
    const group = owner[edge[0]] ?? -1;
    if (group >= 0 && group === owner[edge[1]] && expanded.has(groups[group]?.id ?? "")) found[group]?.push(edge);
  }
  return found;
}

/** Edges between boxes; one that would close a cycle (a module used twice) is turned away by mean position. */
function linksBetween(edges: Pairs, owner: Owner, count: number, order: Float64Array): Links {
  const sum = new Float64Array(count);
  const size = new Float64Array(count);
  owner.forEach((box: number, op: number) => {
    if (box < 0) return;
    sum[box] = (sum[box] ?? 0) + (order[op] ?? 0);
    size[box] = (size[box] ?? 0) + 1;
  });
  const rank = (box: number) => (sum[box] ?? 0) / Math.max(1, size[box] ?? 0) + box * 1e-6;
  const succs: Set<number>[] = Array.from({ length: count }, () => new Set());
  const of = (op: number) => (owner instanceof Int32Array ? owner[op] : owner.get(op)) ?? -1;
  for (const [from, to] of edges) {
    const a = of(from);
    const b = of(to);
    if (a >= 0 && b >= 0 && a !== b && rank(a) < rank(b)) succs[a]?.add(b);
  }
  const preds: number[][] = Array.from({ length: count }, () => []);
  succs.forEach((set, a) => {
    for (const b of set) preds[b]?.push(a);
  });
  return { preds, succs: succs.map((set) => [...set].sort((a, b) => rank(a) - rank(b))) };
}

function sizedBox(group: Group, isExpanded: boolean): Box {
  const text = Math.max(group.label.length * 8.3 + 30, Math.min(112, group.sub.length * 6 + 40));
  const w = Math.min(214, Math.max(96, Math.round(text)));
  return { id: group.id, group, op: null, expanded: isExpanded, parent: -1, depth: 0, x: 0, y: 0, w, h: BOX_H };
}

interface Inside {
  /** Positions are relative to the frame; `parent` is an index into this list, -1 for the frame itself. */
  readonly boxes: Box[];
  readonly edges: readonly Edge[];
}

interface Inner {
  readonly order: Float64Array;
  readonly expanded: ReadonlySet<string>;
  readonly fold: number;
}

type Part = Group | LogicalOp;
const isGroup = (part: Part): part is Group => "members" in part;

function innerBox(group: Group, part: Part, expanded: ReadonlySet<string>, depth: number): Box {
  const place = { parent: -1, depth, x: 0, y: 0, w: OP_W, h: OP_H };
  if (!isGroup(part)) return { id: part.id, group, op: part, expanded: false, ...place };
  return { id: part.id, group: part, op: null, expanded: expanded.has(part.id), ...place };
}

/** Lay out what is inside one group, and give its box their size. */
function placeInside(group: Group, box: Box, edges: Pairs, inner: Inner): Inside {
  const parts: readonly Part[] = group.children.length > 0 ? group.children : group.members;
  const owner = new Map<number, number>();
  parts.forEach((part, index) => {
    for (const op of part.ops) owner.set(op, index);
  });
  const links = linksBetween(edges, owner, parts.length, inner.order);
  const boxes = parts.map((part) => innerBox(group, part, inner.expanded, box.depth + 1));
  const nested = parts.map((part, index) => {
    if (!isGroup(part) || !inner.expanded.has(part.id)) return null;
    const own = edges.filter(([from, to]) => owner.get(from) === index && owner.get(to) === index);
    return placeInside(part, boxes[index] as Box, own, inner);
  });
  const size = placeCells(boxes, cellsOf(longestPath(parts.length, links), links), group.bucket, inner.fold);
  box.w = Math.max(box.w, size.width);
  box.h = size.height;
  const all = { boxes, edges: [...reduceEdges(links)] };
  nested.forEach((inside, index) => {
    if (inside !== null) put(all, index, inside);
  });
  return all;
}

/** Put what is inside of box `index` behind the boxes and edges that are there. */
function put(into: { readonly boxes: Box[]; readonly edges: Edge[] }, index: number, inside: Inside): number {
  const frame = into.boxes[index] as Box;
  const base = into.boxes.length;
  for (const box of inside.boxes) {
    const parent = box.parent < 0 ? index : box.parent + base;
    into.boxes.push({ ...box, parent, x: box.x + frame.x, y: box.y + frame.y });
  }
  for (const edge of inside.edges) {
    into.edges.push({ from: edge.from + base, to: edge.to + base, implied: edge.implied });
  }
  return base;
}

function longestPath(count: number, links: Links): Int32Array {
  const rank = new Int32Array(count);
  const left = links.preds.map((list) => list.length);
  const queue = left.flatMap((degree, index) => (degree === 0 ? [index] : []));
  for (let head = 0; head < queue.length; head++) {
    const at = queue[head] as number;
    for (const next of links.succs[at] ?? []) {
      rank[next] = Math.max(rank[next] ?? 0, (rank[at] ?? 0) + 1);
      left[next] = (left[next] ?? 1) - 1;
      if (left[next] === 0) queue.push(next);
    }
  }
  return rank;
}

/** Columns of members by rank, ordered by the mean row of what feeds them; tall columns are folded. */
function cellsOf(rank: Int32Array, links: Links): number[][] {
  const byRank: number[][] = [];
  rank.forEach((r, member) => {
    byRank[r] ??= [];
    byRank[r].push(member);
  });
  const row = new Float64Array(rank.length);
  const columns: number[][] = [];
  for (const column of byRank) {
    const key = new Map(column.map((member) => [member, meanOf(links.preds[member] ?? [], row, member)]));
    column.sort((a, b) => (key.get(a) ?? 0) - (key.get(b) ?? 0) || a - b);
    column.forEach((member, index) => {
      row[member] = index;
    });
    const tall = Math.ceil(column.length / Math.ceil(column.length / MAX_ROWS));
    for (let at = 0; at < column.length; at += tall) columns.push(column.slice(at, at + tall));
  }
  return columns;
}

function meanOf(list: readonly number[], of: Float64Array, fallback: number): number {
  if (list.length === 0) return fallback;
  return list.reduce((sum, one) => sum + (of[one] ?? 0), 0) / list.length;
}

const numBands = (groups: readonly Group[]): number => new Set(groups.map(bandOf)).size;

/** Column of every group, from 0. Groups are visited in dependency order, so predecessors are placed first. */
export function columnsOf(groups: readonly Group[], links: Links): Int32Array {
  const column = new Int32Array(groups.length);
  const order = visitOrder(groups.length, links);
  for (const g of order) if (bandOf(groups[g] as Group) === 0) column[g] = forwardColumn(g, groups, links, column);
  const forwardOf = new Map<string, number>();
  let last = 0;
  groups.forEach((group, g) => {
    if (bandOf(group) !== 0) return;
    last = Math.max(last, column[g] ?? 0);
    if (group.bucket === "forward") forwardOf.set(group.module, column[g] ?? 0);
  });
  for (const g of order) {
    if (bandOf(groups[g] as Group) === 1) column[g] = backwardColumn(g, groups, links, column, forwardOf, last);
  }
  for (const g of order) if (bandOf(groups[g] as Group) > 1) column[g] = lowerColumn(g, groups, links, column);
  const lowest = column.reduce((least, one) => Math.min(least, one), 0);
  return column.map((one) => one - lowest);
}

function visitOrder(count: number, links: Links): number[] {
  const rank = longestPath(count, links);
  return Array.from({ length: count }, (_, index) => index).sort((a, b) => (rank[a] ?? 0) - (rank[b] ?? 0) || a - b);
}

function forwardColumn(g: number, groups: readonly Group[], links: Links, column: Int32Array): number {
  let at = 0;
  for (const pred of links.preds[g] ?? []) {
    if (bandOf(groups[pred] as Group) === 0) at = Math.max(at, (column[pred] ?? 0) + 1);
  }
  return at;
}

function backwardColumn(
  g: number,
  groups: readonly Group[],
  links: Links,
  column: Int32Array,
  forwardOf: ReadonlyMap<string, number>,
  last: number,
): number {
  let limit = last;
  for (const pred of links.preds[g] ?? []) {
    if (bandOf(groups[pred] as Group) === 1) limit = Math.min(limit, (column[pred] ?? 0) - 1);
  }
  const { module } = groups[g] as Group;
  const twin = module === "" ? undefined : forwardOf.get(module);
  if (twin !== undefined) return Math.min(limit, twin);
  // Where the way back begins (the scale of the loss) there is nothing above to stand under.
  return limit === last && !(links.preds[g] ?? []).some((pred) => bandOf(groups[pred] as Group) === 1)
    ? last + 1
    : limit;
}

/** Exchange and updates stand where most of what they take comes from. */
function lowerColumn(g: number, groups: readonly Group[], links: Links, column: Int32Array): number {
  const group = groups[g] as Group;
  const near = (links.preds[g] ?? []).filter((pred) => bandOf(groups[pred] as Group) >= 1);
  const twin = near.find((pred) => (groups[pred] as Group).module === group.module && group.module !== "");
  if (twin !== undefined) return column[twin] ?? 0;
  const from = near.length > 0 ? near : (links.preds[g] ?? []);
  if (from.length === 0) return 0;
  return Math.round(from.reduce((sum, pred) => sum + (column[pred] ?? 0), 0) / from.length);
}

/** Place the bands one below the other; height that is left goes into taller boxes, then into wider gaps. */
function placeAcross(
  boxes: readonly Box[],
  groups: readonly Group[],
  columns: Int32Array,
  links: Links,
  aspect: number,
): { width: number; height: number } {
  let size = placeBands(boxes, groups, columns, links, BAND_GAP);
  const spare = size.width / aspect - size.height;
  if (spare <= 0) return size;
  const rows = numRows(groups, columns);
  const grown = Math.min(MAX_BOX_H, BOX_H + (spare * BOX_SHARE) / rows);
  for (const box of boxes) if (!box.expanded) box.h = grown;
  size = placeBands(boxes, groups, columns, links, BAND_GAP);
  const gap = BAND_GAP + (size.width / aspect - size.height) / Math.max(1, numBands(groups) - 1);
  return gap > BAND_GAP ? placeBands(boxes, groups, columns, links, Math.min(MAX_BAND_GAP, gap)) : size;
}

/** Boxes one below the other at most: of every band its tallest column. */
function numRows(groups: readonly Group[], columns: Int32Array): number {
  const stacked = new Map<string, number>();
  const tallest = new Map<number, number>();
  groups.forEach((group, g) => {
    const band = bandOf(group);
    const count = (stacked.get(`${band} ${columns[g]}`) ?? 0) + 1;
    stacked.set(`${band} ${columns[g]}`, count);
    tallest.set(band, Math.max(tallest.get(band) ?? 0, count));
  });
  return Math.max(
    1,
    [...tallest.values()].reduce((sum, one) => sum + one, 0),
  );
}

function placeBands(
  boxes: readonly Box[],
  groups: readonly Group[],
  columns: Int32Array,
  links: Links,
  bandGap: number,
): { width: number; height: number } {
  const numColumns = columns.reduce((most, one) => Math.max(most, one + 1), 0);
  const x: number[] = [];
  let width = 0;
  for (let c = 0; c < numColumns; c++) {
    const widest = boxes.reduce((most, box, g) => (columns[g] === c ? Math.max(most, box.w) : most), 0);
    x.push(width);
    boxes.forEach((box, g) => {
      if (columns[g] === c) box.x = width + (widest - box.w) / 2;
    });
    width += widest + (widest > 0 ? GAP_X : 0);
  }
  let top = 0;
  for (let b = 0; b <= 4; b++) {
    const height = placeBand(b, boxes, groups, columns, links, top);
    if (height > 0) top += height + bandGap;
  }
  return { width: Math.max(0, width - GAP_X), height: Math.max(0, top - bandGap) };
}

function placeBand(
  b: number,
  boxes: readonly Box[],
  groups: readonly Group[],
  columns: Int32Array,
  links: Links,
  top: number,
): number {
  const stacks = new Map<number, number[]>();
  groups.forEach((group, g) => {
    if (bandOf(group) !== b) return;
    const stack = stacks.get(columns[g] ?? 0) ?? [];
    stack.push(g);
    stacks.set(columns[g] ?? 0, stack);
  });
  const heightOf = (stack: readonly number[]) => stack.reduce((sum, g) => sum + (boxes[g]?.h ?? 0) + GAP_Y, 0) - GAP_Y;
  const height = [...stacks.values()].reduce((most, stack) => Math.max(most, heightOf(stack)), 0);
  const centre = new Float64Array(boxes.length);
  for (let sweep = 0; sweep < 4; sweep++) {
    for (const [, stack] of [...stacks].sort((a, c) => (sweep % 2 === 0 ? a[0] - c[0] : c[0] - a[0]))) {
      sortByNeighbours(stack, links, centre);
      let y = top + (b === 0 ? (height - heightOf(stack)) / 2 : 0);
      for (const g of stack) {
        const box = boxes[g] as Box;
        box.y = y;
        centre[g] = y + box.h / 2;
        y += box.h + GAP_Y;
      }
    }
  }
  return Math.max(0, height);
}

function sortByNeighbours(stack: number[], links: Links, centre: Float64Array): void {
  const key = new Map<number, number>();
  for (const g of stack) {
    const near = [...(links.preds[g] ?? []), ...(links.succs[g] ?? [])].filter((one) => (centre[one] ?? 0) > 0);
    key.set(g, meanOf(near, centre, centre[g] ?? 0));
  }
  stack.sort((a, b) => (key.get(a) ?? 0) - (key.get(b) ?? 0) || a - b);
}

/** Mark every edge that a longer path implies; without it a training graph is a hairball of saved tensors. */
export function reduceEdges(links: Links): Edge[] {
  const n = links.succs.length;
  const words = Math.ceil(n / 32);
  const reach = n <= REDUCE_LIMIT ? new Uint32Array(n * words) : null;
  const order = visitOrder(n, links).reverse();
  const rank = new Int32Array(n);
  order.forEach((box, index) => {
    rank[box] = index;
  });
  const edges: Edge[] = [];
  for (const a of order) {
    const mine = (box: number) => (((reach?.[a * words + (box >> 5)] ?? 0) >>> (box & 31)) & 1) === 1;
    const next = [...(links.succs[a] ?? [])].sort((p, q) => (rank[q] ?? 0) - (rank[p] ?? 0));
    for (const b of next) {
      edges.push({ from: a, to: b, implied: mine(b) });
      if (reach === null) continue;
      for (let w = 0; w < words; w++) {
        reach[a * words + w] = (reach[a * words + w] ?? 0) | (reach[b * words + w] ?? 0);
      }
      reach[a * words + (b >> 5)] = (reach[a * words + (b >> 5)] ?? 0) | (1 << (b & 31));
    }
  }
  return edges;
}

function addInside(index: number, inside: Inside | null, boxes: Box[], edges: Edge[], boxOfOp: Int32Array): void {
  if (inside === null) return;
  const base = put({ boxes, edges }, index, inside);
  // Outer boxes come before those inside them, so the innermost is the last that is written.
  for (let at = base; at < boxes.length; at++) {
    const box = boxes[at] as Box;
    for (const op of box.op?.ops ?? box.group.ops) boxOfOp[op] = at;
  }
}
