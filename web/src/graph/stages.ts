/**
 * The graph as it was before and after each pass, from what its document says of passes. Pure; walks back from the
 * graph that runs, as core/penstock/protocol/graphstages.py does.
 *
 * Ids of operators: below `ops.length` those of the document, from there on those that passes removed, in their order.
 */
import { shortType } from "../format";
import type { GraphDocument, GraphOp, GraphPass } from "../types";
import type { Group } from "./group";

type Passes = NonNullable<GraphDocument["passes"]>;
type Forms = Passes["was"];
type Side = "before" | "after";

/** What a pass does to an operator of a stage, as its place in this list. */
export const MARKS = ["same", "removed", "added", "changed"] as const;
export type Mark = (typeof MARKS)[number];
const [SAME, REMOVED, ADDED, CHANGED] = [0, 1, 2, 3];

/** A graph between two passes. `marks`: what the pass beside it does to each operator. */
export interface Stage {
  readonly document: GraphDocument;
  readonly marks: Uint8Array;
}

/** What a pass did, in numbers; operators by type, the most frequent first. */
export interface PassFacts {
  readonly name: string;
  readonly title: string;
  readonly before: number;
  readonly after: number;
  readonly removed: readonly TypeCount[];
  readonly added: readonly TypeCount[];
  readonly changed: readonly TypeCount[];
  readonly edgesRemoved: number;
  readonly edgesAdded: number;
}
/** `type`: of a changed one what it was and is, "mm → product", or once if it reads and writes something else. */
export interface TypeCount {
  readonly type: string;
  readonly count: number;
}

/** Values of a column that is stored as first, step, number, …, or of rows of `width` numbers, one after another. */
export function unpacked(flat: readonly number[], width = 1): number[] {
  const values: number[] = [];
  for (let at = 0; at < flat.length; at += 2 * width + 1) {
    const number = flat[at + 2 * width] ?? 0;
    for (let n = 0; n < number; n++) {
      for (let i = 0; i < width; i++) values.push((flat[at + i] ?? 0) + n * (flat[at + width + i] ?? 0));
    }
  }
  return values;
}

const sumOfCounts = (counts: readonly TypeCount[]): number => counts.reduce((sum, one) => sum + one.count, 0);

export const numberOf = ({ removed, added, changed }: PassFacts) => ({
  removed: sumOfCounts(removed),
  added: sumOfCounts(added),
  changed: sumOfCounts(changed),
});

const known = new WeakMap<GraphDocument, readonly PassFacts[]>();

/** The passes that changed a graph, in order. */
export function passesOf(document: GraphDocument): readonly PassFacts[] {
  let found = known.get(document);
  if (found === undefined) {
    found = factsOf(document);
    known.set(document, found);
  }
  return found;
}

function factsOf(document: GraphDocument): PassFacts[] {
  const passes = document.passes ?? null;
  if (passes === null) return [];
  const walk = new Walk(document, passes);
  const found: PassFacts[] = [];
  for (let index = passes.ran.length - 1; index >= 0; index--) {
    const pass = passes.ran[index] as GraphPass;
    const after = walk.ops.size;
    const added = countTypes(unpacked(pass.added), (id) => walk.typeOf(id));
    const now = new Map(unpacked(pass.changed).map((id) => [id, walk.typeOf(id)]));
    const { removed, changed } = walk.undo(index);
    found.push({
      name: pass.name,
      title: pass.title,
      before: walk.ops.size,
      after,
      removed: countTypes(removed, (id) => walk.typeOf(id)),
      added,
      changed: countTypes(changed, (id) => fromTo(walk.typeOf(id), now.get(id) ?? "")),
      edgesRemoved: unpacked(pass.edges_removed, 2).length / 2,
      edgesAdded: unpacked(pass.edges_added, 2).length / 2,
    });
  }
  return found.reverse();
}

const fromTo = (was: string, is: string): string => (was === is ? was : `${was} → ${is}`);

function countTypes(ids: readonly number[], typeOf: (id: number) => string): TypeCount[] {
  const counts = new Map<string, number>();
  for (const id of ids) counts.set(typeOf(id), (counts.get(typeOf(id)) ?? 0) + 1);
  return [...counts].map(([type, count]) => ({ type, count })).sort((a, b) => b.count - a.count);
}

const made = new WeakMap<GraphDocument, Map<string, Stage | null>>();

/** The graph before or after the pass `index` of `passesOf`; null if there is none. The same object each time. */
export function stageOf(document: GraphDocument, index: number, side: Side): Stage | null {
  const known = made.get(document) ?? new Map<string, Stage | null>();
  made.set(document, known);
  const key = `${index}${side}`;
  let found = known.get(key);
  if (found === undefined) {
    found = computeStage(document, index, side);
    known.set(key, found);
  }
  return found;
}

function computeStage(document: GraphDocument, index: number, side: Side): Stage | null {
  const passes = document.passes ?? null;
  const pass = passes?.ran[index];
  if (passes === null || pass === undefined) return null;
  const walk = new Walk(document, passes);
  for (let at = passes.ran.length - 1; at > index; at--) walk.undo(at);
  const marks = new Map<number, number>(unpacked(pass.changed).map((id) => [id, CHANGED]));
  if (side === "after") for (const id of unpacked(pass.added)) marks.set(id, ADDED);
  else for (const id of walk.undo(index).removed) marks.set(id, REMOVED);
  return walk.stage(marks);
}

/** An edge as one number: ids are below 2²⁶. */
const EDGE = 2 ** 26;

/** A graph that passes are taken back from, the last first. */
class Walk {
  readonly ops = new Map<number, GraphOp>();
  readonly #edges = new Set<number>();
  readonly #removed: readonly GraphOp[];
  readonly #was: readonly GraphOp[];
  #removedEnd: number;
  #wasEnd: number;

  constructor(
    private readonly document: GraphDocument,
    private readonly passes: Passes,
  ) {
    document.ops.forEach((op, index) => {
      this.ops.set(index, op);
    });
    for (const [from, to] of document.edges) this.#edges.add(from * EDGE + to);
    this.#removed = removedOps(passes);
    this.#was = formsOf(passes.was, passes.texts);
    this.#removedEnd = this.#removed.length;
    this.#wasEnd = this.#was.length;
  }

  typeOf(id: number): string {
    return shortType(this.ops.get(id)?.type ?? "");
  }

  /** Take back a pass, the one before those that were; return the ids of what it removed and changed. */
  undo(index: number): { readonly removed: readonly number[]; readonly changed: readonly number[] } {
    const pass = this.passes.ran[index] as GraphPass;
    for (const id of unpacked(pass.added)) this.ops.delete(id);
    const removed: number[] = [];
    for (let n = this.#removedEnd - pass.removed; n < this.#removedEnd; n++) {
      this.ops.set(this.document.ops.length + n, this.#removed[n] as GraphOp);
      removed.push(this.document.ops.length + n);
    }
    this.#removedEnd -= pass.removed;
    const changed = unpacked(pass.changed);
    this.#wasEnd -= changed.length;
    changed.forEach((id, n) => {
      const [form, now] = [this.#was[this.#wasEnd + n] as GraphOp, this.ops.get(id) as GraphOp];
      this.ops.set(id, { ...form, name: now.name, replica: now.replica });
    });
    for (const edge of edgesOf(pass.edges_added)) this.#edges.delete(edge);
    for (const edge of edgesOf(pass.edges_removed)) this.#edges.add(edge);
    return { removed, changed };
  }

  stage(marks: ReadonlyMap<number, number>): Stage {
    const ids = [...this.ops.keys()];
    const place = new Map(ids.map((id, index) => [id, index]));
    const at = (id: number) => place.get(id) ?? -1;
    const edges = [...this.#edges].map((edge): [number, number] => [at(Math.floor(edge / EDGE)), at(edge % EDGE)]);
    const syncs = this.document.syncs.map((sync) => ({ ...sync, ops: sync.ops.map(at).filter((op) => op >= 0) }));
    const document = { ...this.document, ops: [...this.ops.values()], edges, syncs, passes: null };
    return { document, marks: Uint8Array.from(ids, (id) => marks.get(id) ?? SAME) };
  }
}

function edgesOf(flat: readonly number[]): number[] {
  const pairs = unpacked(flat, 2);
  const edges: number[] = [];
  for (let i = 0; i < pairs.length; i += 2) edges.push((pairs[i] ?? 0) * EDGE + (pairs[i + 1] ?? 0));
  return edges;
}

function removedOps({ removed, texts }: Passes): GraphOp[] {
  const [names, first] = [joined(removed.name, removed.name_number, texts), unpacked(removed.first)];
  const counts = unpacked(removed.count);
  return formsOf(removed, texts).flatMap((form, row) =>
    Array.from({ length: counts[row] ?? 0 }, (_, n) => ({
      ...form,
      name: names[row] ?? "",
      replica: (first[row] ?? 0) + n,
    })),
  );
}

/** Operators without name and replica; what they read and wrote is not stored. */
function formsOf(forms: Forms, texts: readonly string[]): GraphOp[] {
  const text = (column: readonly number[]) => unpacked(column).map((index) => texts[index] ?? "");
  const [kinds, roles, sources] = [text(forms.kind), text(forms.role), text(forms.source)];
  const modules = joined(forms.module, forms.module_number, texts);
  return text(forms.type).map((type, row) => ({
    name: "",
    type,
    kind: kinds[row] as GraphOp["kind"],
    role: roles[row] as GraphOp["role"],
    replica: 0,
    module: modules[row] ?? "",
    source: sources[row] ?? "",
    inputs: [],
    outputs: [],
    bytes: 0,
    flops: 0,
  }));
}

function joined(column: readonly number[], numbers: readonly number[], texts: readonly string[]): string[] {
  const of = unpacked(numbers);
  return unpacked(column).map((index, row) => {
    const number = of[row] ?? -1;
    return number < 0 ? (texts[index] ?? "") : `${texts[index] ?? ""}${number}`;
  });
}

/** What a pass does to operators: nothing, one thing, or several ("changed"). `part`: of how many of them, 0 to 1. */
export function markOf(marks: Uint8Array, ops: Group["ops"]): { readonly mark: Mark; readonly part: number } {
  let [mark, touched] = [SAME, 0];
  for (const op of ops) {
    const one = marks[op] ?? SAME;
    if (one === SAME) continue;
    mark = touched === 0 || mark === one ? one : CHANGED;
    touched += 1;
  }
  return { mark: MARKS[mark] ?? "same", part: ops.length === 0 ? 0 : touched / ops.length };
}
