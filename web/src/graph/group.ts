/**
 * From operators to boxes: one box for each module and phase, merged over replicas, so that a page shows a
 * few dozen boxes for a graph of thousands of operators. Pure; the same document always gives the same boxes.
 */
import { shortType } from "../format";
import type { GraphDocument, GraphOp } from "../types";
import { topologyOf } from "./topology";

/** What a colour stands for, in every view. */
export type Bucket = "forward" | "backward" | "optimize" | "communication" | "input";
export const BUCKETS: readonly Bucket[] = ["forward", "backward", "optimize", "communication", "input"];

/** One operator of the program, with its index in each replica; of repeated layers one for all of them. */
export interface LogicalOp {
  readonly id: string;
  readonly name: string;
  readonly type: string;
  readonly bucket: Bucket;
  /** Module path, with "*" for what repeated layers are numbered by. */
  readonly module: string;
  readonly ops: readonly number[];
}

export interface Group {
  readonly id: string;
  readonly label: string;
  readonly sub: string;
  readonly bucket: Bucket;
  /** Module path that forward, backward and exchange of one layer share; columns are aligned by it. */
  readonly module: string;
  readonly afterUpdate: boolean;
  readonly members: readonly LogicalOp[];
  readonly ops: readonly number[];
  /** Modules inside, which an expanded group shows; none: it shows its operators. */
  readonly children: readonly Group[];
}

export const MAX_GROUPS = 36;
/** A module of this many operators or fewer shows them at once. */
const MIN_NESTED = 10;
const COMM_KINDS = new Set(["all_reduce", "reduce", "broadcast", "gather", "rpc"]);

export function bucketOf(op: GraphOp): Bucket {
  if (COMM_KINDS.has(op.kind) || op.role === "communication") return "communication";
  if (op.kind === "feed" || op.kind === "fetch" || op.role === "input") return "input";
  if (op.role === "backward" || op.kind === "scale_loss_grad") return "backward";
  if (op.role === "optimize" || op.role === "lr_sched") return "optimize";
  return "forward";
}

const codes = new WeakMap<GraphDocument, Uint8Array>();

/** The bucket of each operator, as its place in `BUCKETS`; found once, for loops over many slices. */
export function bucketCodes(document: GraphDocument): Uint8Array {
  let found = codes.get(document);
  if (found === undefined) {
    found = Uint8Array.from(document.ops, (op) => BUCKETS.indexOf(bucketOf(op)));
    codes.set(document, found);
  }
  return found;
}

/**
 * Module of each operator. An exchange or an update belongs to the layer whose gradient it takes, whatever module the
 * program gave it (an optimizer's own, or none): it inherits the most frequent module of what it depends on.
 */
export function modulesOf(document: GraphDocument): readonly string[] {
  let found = known.get(document);
  if (found === undefined) {
    found = computeModules(document);
    known.set(document, found);
  }
  return found;
}

const known = new WeakMap<GraphDocument, readonly string[]>();

function computeModules(document: GraphDocument): string[] {
  const modules = document.ops.map((op) => op.module);
  const buckets = document.ops.map(bucketOf);
  const { order, predStart, preds } = topologyOf(document);
  for (const op of order) {
    if (buckets[op] !== "communication" && buckets[op] !== "optimize") continue;
    const from = [...preds.subarray(predStart[op], predStart[op + 1])].filter(
      (pred) => buckets[pred] !== "forward" && buckets[pred] !== "input",
    );
    const owners = from.map((pred) => modules[pred] ?? "");
    modules[op] =
      document.ops[op]?.kind === "rpc" && isOfMany(owners)
        ? document.ops[op].module
        : (mostFrequent(owners) ?? modules[op] ?? "");
  }
  for (const sync of document.syncs) {
    const owner = sync.parameter.replace(/\.[^.]*$/, "");
    for (const op of sync.ops) if (modules[op] === "") modules[op] = owner;
  }
  for (const [op, module] of tablesUpdated(document, buckets)) modules[op] = module;
  return modules;
}

/** Updates that read the rows of sparse gradients in place, from the layer behind the lookups; each with its tables' module. */
function tablesUpdated(document: GraphDocument, buckets: readonly Bucket[]): Map<number, string> {
  const found = new Map<number, string>();
  for (const sync of document.syncs.filter((one) => one.sparse)) {
    const owner = sync.parameter.replace(/\.[^.]*$/, "");
    for (const op of sync.ops.filter((one) => buckets[one] === "optimize")) {
      found.set(op, (found.get(op) ?? owner) === owner ? owner : "tables");
    }
  }
  return found;
}

/** An operator that takes the gradients of a whole program, as a sync step's exchange with servers, is no layer's but the one it was given. */
const isOfMany = (owners: readonly string[]): boolean => new Set(owners.filter((one) => one !== "")).size > 2;

function mostFrequent(names: readonly string[]): string | undefined {
  const counts = new Map<string, number>();
  for (const name of names) if (name !== "") counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
}

interface Draft {
  readonly bucket: Bucket;
  readonly module: string;
  readonly kind: string;
  readonly afterUpdate: boolean;
  readonly ops: number[];
}

/** Boxes of a document, computed once for each choice of replica: every expansion asks for them. */
export function groupOps(document: GraphDocument, replica: number | "all"): readonly Group[] {
  const kept = grouped.get(document) ?? new Map<number | "all", readonly Group[]>();
  grouped.set(document, kept);
  const found = kept.get(replica) ?? computeGroups(document, replica);
  kept.set(replica, found);
  return found;
}

const grouped = new WeakMap<GraphDocument, Map<number | "all", readonly Group[]>>();

function computeGroups(document: GraphDocument, replica: number | "all"): Group[] {
  const modules = modulesOf(document);
  const folded = foldRepeats(modules);
  const deepest = modules.reduce((most, path) => Math.max(most, levelsOf(path)), 1);
  let drafts: Draft[] = [];
  for (let depth = deepest; depth >= 0; depth--) {
    drafts = draft(document, modules, replica, depth);
    if (drafts.length <= MAX_GROUPS) break;
    drafts = draft(document, folded.map(toFirstRepeat), replica, depth);
    if (drafts.length <= MAX_GROUPS) break;
  }
  return drafts.map((one) => finish(document, one, modules, folded));
}

/** A repeated layer is one box, whatever is inside. */
const toFirstRepeat = (path: string): string => /^[^*]*\*/.exec(path)?.[0] ?? path;

/**
 * Module paths with "*" in place of the number of a repeated layer: "layers.0.attn.q" … "layers.43.attn.q" become
 * "layers.*.attn.q", where more than four siblings differ only by a number.
 */
export function foldRepeats(modules: readonly string[]): string[] {
  const siblings = new Map<string, Set<string>>();
  const stemOf = (part: string) => part.replace(/\d+$/, "*");
  const walk = (visit: (above: string, part: string) => string) =>
    modules.map((path) => (path === "" ? "" : path.split(".").reduce((above, part) => visit(above, part), "")));
  const join = (above: string, part: string) => (above === "" ? part : `${above}.${part}`);
  // Level by level: which siblings there are is known only for parents that are folded already.
  for (let before = -1; siblings.size !== before; ) {
    before = siblings.size;
    walk((above, part) => {
      const key = join(above, stemOf(part));
      const set = siblings.get(key) ?? new Set<string>();
      siblings.set(key, set.add(part));
      return join(above, set.size > 4 ? stemOf(part) : part);
    });
  }
  return walk((above, part) => {
    const key = join(above, stemOf(part));
    return join(above, (siblings.get(key)?.size ?? 0) > 4 ? stemOf(part) : part);
  });
}

function draft(document: GraphDocument, modules: readonly string[], replica: number | "all", depth: number): Draft[] {
  const drafts = new Map<string, Draft>();
  const updated = afterOptimize(document);
  document.ops.forEach((op, index) => {
    if (replica !== "all" && op.replica !== replica && op.replica !== -1) return;
    const bucket = bucketOf(op);
    const module = upTo(modules[index] ?? "", depth);
    const kind = bucket === "input" || bucket === "communication" ? op.kind : module === "" ? nameStem(op) : "";
    const late = bucket === "communication" && updated[index] === 1;
    const key = `${bucket}|${module}|${kind}|${late}`;
    const one = drafts.get(key) ?? { bucket, module, kind, afterUpdate: late, ops: [] };
    one.ops.push(index);
    drafts.set(key, one);
  });
  return [...drafts.values()];
}

/** Operators without a module: losses stand apart from what computes them. */
function nameStem(op: GraphOp): string {
  if (op.kind === "scale_loss_grad") return "loss scale";
  if (op.role === "loss") return "loss";
  return op.role === "lr_sched" ? "learning rate" : "";
}

/** 1 for operators that run after an update, such as the broadcast of Reduce mode. */
function afterOptimize(document: GraphDocument): Uint8Array {
  const marks = new Uint8Array(document.ops.length);
  const isUpdate = document.ops.map((op) => bucketOf(op) === "optimize");
  for (const [from, to] of document.edges) if (isUpdate[from] === true) marks[to] = 1;
  return marks;
}

const LABEL: Readonly<Record<Bucket, (base: string, draft: Draft) => string>> = {
  forward: (base, one) => base || one.kind,
  backward: (base, one) => (base === "" ? one.kind || "gradients" : `${base} grad`),
  optimize: (base, one) => (base === "" ? one.kind || "update" : `${base} update`),
  communication: (base, one) =>
    base === "parameter_server" ? "parameter servers" : `${one.kind.replace("_", "-")} ${base}`.trim(),
  input: (base, one) => (base === "" ? one.kind.replace("computation", "input") : base),
};

function finish(document: GraphDocument, one: Draft, modules: readonly string[], folded: readonly string[]): Group {
  const members = logical(document, one, modules, folded);
  const made = named(
    one,
    members,
    one.ops.map((op) => modules[op] ?? ""),
  );
  return { ...made, children: childrenOf(made, modules) };
}

function named(one: Draft, members: readonly LogicalOp[], paths: readonly string[]): Omit<Group, "children"> {
  const path = one.module.split(".");
  const last = path[path.length - 1] ?? "";
  // "layers.*": the number is all of the last part, and the name is above it.
  const base = last === "*" ? (path[path.length - 2] ?? "") : last.replace(/_?\*$/, "s");
  const depth = path.length;
  const parts = new Set(paths.map((at) => upTo(at, depth))).size;
  const times = one.module.includes("*") && parts > 1 ? ` ×${parts}` : "";
  return {
    id: `${one.bucket}|${one.module}|${one.kind}|${one.afterUpdate}`,
    label: (LABEL[one.bucket](base, one) || summary(members, 1)) + times,
    sub: summary(members, 2),
    bucket: one.bucket,
    module: one.module,
    afterUpdate: one.afterUpdate,
    members,
    ops: one.ops,
  };
}

/** The modules inside a group, and as one more what stands in it directly. Modules with one module inside are skipped. */
function childrenOf(group: Omit<Group, "children">, modules: readonly string[]): Group[] {
  if (group.members.length <= MIN_NESTED) return [];
  const start = group.module === "" ? 0 : group.module.split(".").length;
  const deepest = group.members.reduce((most, member) => Math.max(most, levelsOf(member.module)), 0);
  for (let depth = start + 1; depth <= deepest; depth++) {
    const parts = new Map<string, LogicalOp[]>();
    for (const member of group.members) {
      const module = upTo(member.module, depth);
      const part = parts.get(module);
      if (part === undefined) parts.set(module, [member]);
      else part.push(member);
    }
    if (parts.size < 2) continue;
    return [...parts].map(([module, members]) => {
      const ops = members.flatMap((member) => member.ops);
      const own = module === group.module;
      const kind = own ? "own" : "";
      const one: Draft = { bucket: group.bucket, module, kind, afterUpdate: group.afterUpdate, ops };
      const paths = ops.map((op) => modules[op] ?? "");
      const made = named(one, members, paths);
      const label = own ? summary(members, 1) : made.label.replace(/ ×\d+$/, "");
      const child = { ...made, label };
      return { ...child, children: own ? [] : childrenOf(child, modules) };
    });
  }
  return [];
}

function levelsOf(path: string): number {
  let levels = 1;
  for (let at = path.indexOf("."); at >= 0; at = path.indexOf(".", at + 1)) levels++;
  return levels;
}

/** The first `depth` levels of a module path, without an array for each of many thousand operators. */
function upTo(path: string, depth: number): string {
  if (depth === 0) return "";
  let at = -1;
  for (let level = 0; level < depth; level++) {
    at = path.indexOf(".", at + 1);
    if (at < 0) return path;
  }
  return path.slice(0, at);
}

/** Every group, those inside others too. */
export function everyGroup(groups: readonly Group[]): Group[] {
  return groups.flatMap((group) => [group, ...everyGroup(group.children)]);
}

/** The groups around an operator, the outermost first. */
export function pathTo(groups: readonly Group[], op: number): Group[] {
  const found = groups.find((group) => group.ops.includes(op));
  return found === undefined ? [] : [found, ...pathTo(found.children, op)];
}

/** Operators by name, over replicas; of repeated layers the n-th of a type in each, over layers too. */
function logical(
  document: GraphDocument,
  one: Draft,
  modules: readonly string[],
  folded: readonly string[],
): LogicalOp[] {
  const found = new Map<string, { module: string; ops: number[] }>();
  const seen = new Map<string, number>();
  for (const index of one.ops) {
    const op = document.ops[index];
    if (op === undefined) continue;
    const module = folded[index] ?? "";
    let key = op.name;
    if (module.includes("*")) {
      const place = `${modules[index]}|${op.replica}|${op.type}`;
      const nth = seen.get(place) ?? 0;
      seen.set(place, nth + 1);
      key = `${module}|${op.type}|${nth}`;
    }
    const entry = found.get(key) ?? { module, ops: [] };
    entry.ops.push(index);
    found.set(key, entry);
  }
  return [...found.values()].map(({ module, ops }) => logicalOp(document, ops, module, one.bucket));
}

/** One operator with its indices. Where they have several names it stands for repeated layers. */
export function logicalOp(document: GraphDocument, ops: readonly number[], module: string, bucket: Bucket): LogicalOp {
  const op = document.ops[ops[0] ?? -1];
  const type = shortType(op?.type ?? "");
  // How many layers there are stands on the box around them.
  const name = ops.some((index) => document.ops[index]?.name !== op?.name) ? type : (op?.name ?? "");
  return { id: `op|${op?.name}|${op?.kind}|${ops[0] ?? 0}`, name, type, bucket, module, ops };
}

/** Views move no bytes; what else a box does says more about it. */
const VIEWS = new Set([
  "t",
  "view",
  "expand",
  "squeeze",
  "unsqueeze",
  "slice",
  "permute",
  "transpose",
  "detach",
  "select",
]);

/** The most frequent types: "addmm · relu", "mm ×2". */
function summary(members: readonly LogicalOp[], most: number): string {
  const counts = new Map<string, number>();
  for (const member of members) counts.set(member.type, (counts.get(member.type) ?? 0) + 1);
  const rank = (type: string, count: number) => (VIEWS.has(type) ? 0 : members.length) + count;
  const top = [...counts].sort((a, b) => rank(...b) - rank(...a)).slice(0, most);
  return top.map(([type, count]) => (count > 1 ? `${type} ×${count}` : type)).join(" · ");
}

/** Which strip of the layout a group belongs to: forward, backward, exchange, updates, and what is sent after them. */
export const bandOf = (group: Group): number => {
  switch (group.bucket) {
    case "forward":
    case "input":
      return 0;
    case "backward":
      return 1;
    case "communication":
      return group.afterUpdate ? 4 : 2;
    case "optimize":
      return 3;
  }
};
