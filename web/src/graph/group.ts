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

/** One operator of the program, with its index in each replica. */
export interface LogicalOp {
  readonly id: string;
  readonly name: string;
  readonly type: string;
  readonly bucket: Bucket;
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
}

export const MAX_GROUPS = 36;
const COMM_KINDS = new Set(["all_reduce", "reduce", "broadcast", "gather", "rpc"]);

export function bucketOf(op: GraphOp): Bucket {
  if (COMM_KINDS.has(op.kind) || op.role === "communication") return "communication";
  if (op.kind === "feed" || op.kind === "fetch" || op.role === "input") return "input";
  if (op.role === "backward" || op.kind === "scale_loss_grad") return "backward";
  if (op.role === "optimize" || op.role === "lr_sched") return "optimize";
  return "forward";
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

export function groupOps(document: GraphDocument, replica: number | "all"): Group[] {
  const modules = modulesOf(document);
  const deepest = modules.reduce((most, path) => Math.max(most, path.split(".").length), 1);
  const merged = mergeSiblings(modules);
  let drafts: Draft[] = [];
  for (let depth = deepest; depth >= 0; depth--) {
    drafts = draft(document, modules, replica, depth);
    if (drafts.length <= MAX_GROUPS) break;
    drafts = draft(document, merged, replica, depth);
    if (drafts.length <= MAX_GROUPS) break;
  }
  return drafts.map((one) => finish(document, one, modules));
}

/** "emb_0" … "emb_10" → "emb_*" where more than four siblings differ only by a number. */
export function mergeSiblings(modules: readonly string[]): string[] {
  const stem = (path: string) => path.replace(/\d+$/, "*");
  const siblings = new Map<string, Set<string>>();
  for (const path of modules) {
    const set = siblings.get(stem(path)) ?? new Set();
    set.add(path);
    siblings.set(stem(path), set);
  }
  return modules.map((path) => ((siblings.get(stem(path))?.size ?? 0) > 4 ? stem(path) : path));
}

function draft(document: GraphDocument, modules: readonly string[], replica: number | "all", depth: number): Draft[] {
  const drafts = new Map<string, Draft>();
  const updated = afterOptimize(document);
  document.ops.forEach((op, index) => {
    if (replica !== "all" && op.replica !== replica && op.replica !== -1) return;
    const bucket = bucketOf(op);
    const module = (modules[index] ?? "").split(".").slice(0, depth).join(".");
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

function finish(document: GraphDocument, one: Draft, modules: readonly string[]): Group {
  const members = logical(document, one);
  const path = one.module.split(".");
  const base = (path[path.length - 1] ?? "").replace(/_?\*$/, "s");
  const parts = new Set(one.ops.map((op) => modules[op] ?? "")).size;
  const times = one.module.endsWith("*") && parts > 1 ? ` ×${parts}` : "";
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

function logical(document: GraphDocument, one: Draft): LogicalOp[] {
  const byName = new Map<string, { op: GraphOp; ops: number[] }>();
  for (const index of one.ops) {
    const op = document.ops[index];
    if (op === undefined) continue;
    const entry = byName.get(op.name) ?? { op, ops: [] };
    entry.ops.push(index);
    byName.set(op.name, entry);
  }
  return [...byName.values()].map(({ op, ops }) => ({
    id: `op|${op.name}|${op.kind}|${ops[0] ?? 0}`,
    name: op.name,
    type: shortType(op.type),
    bucket: one.bucket,
    ops,
  }));
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
