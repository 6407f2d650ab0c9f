/**
 * Groups and their layout together, and the same as flat arrays for the way out of a worker.
 *
 * A plan of 20 000 operators as objects takes the receiver longer to copy than a frame may take; packed it is
 * transferred, and unpacked beside the document that both sides have.
 */
import type { GraphDocument } from "../types";
import { type Bucket, everyGroup, type Group, groupOps, type LogicalOp, logicalOp } from "./group";
import { type Box, type Edge, type Layout, layoutGraph, type Place } from "./layout";

export interface PlanRequest {
  readonly replica: number | "all";
  readonly expanded: readonly string[];
  readonly place: Place;
}

export interface Plan {
  readonly groups: readonly Group[];
  readonly layout: Layout;
}

export function makePlan(document: GraphDocument, request: PlanRequest): Plan {
  const groups = groupOps(document, request.replica);
  return { groups, layout: layoutGraph(document, groups, new Set(request.expanded), request.place) };
}

interface GroupFacts {
  readonly id: string;
  readonly label: string;
  readonly sub: string;
  readonly bucket: Bucket;
  readonly module: string;
  readonly afterUpdate: boolean;
}

/** A group of the outermost level, with its members. */
export interface PackedGroup extends GroupFacts {
  readonly ops: Int32Array;
  /** Operators of member `m`: `memberOps[memberStart[m]] … memberOps[memberStart[m + 1] - 1]`. */
  readonly memberStart: Int32Array;
  readonly memberOps: Int32Array;
  readonly memberModules: readonly string[];
  readonly children: readonly PackedPart[];
}

/** A group inside: which of the outermost group's members it has. */
interface PackedPart extends GroupFacts {
  readonly members: Int32Array;
  readonly children: readonly PackedPart[];
}

export interface PackedPlan {
  /** Null: the receiver has them from an earlier plan of the same document and replica. */
  readonly groups: readonly PackedGroup[] | null;
  /** x, y, w, h of each box. */
  readonly places: Float64Array;
  /** Group, member (-1: the group's own box), whether it is expanded, parent and depth, of each box. */
  readonly kinds: Int32Array;
  /** From, to, implied of each edge. */
  readonly edges: Int32Array;
  readonly boxOfOp: Int32Array;
  readonly groupBoxOfOp: Int32Array;
  readonly width: number;
  readonly height: number;
  readonly down: boolean;
}

const FIELDS = 5;

export function packPlan({ groups, layout }: Plan, hasGroups = false): PackedPlan {
  const every = everyGroup(groups);
  const indexOf = new Map(every.map((group, index) => [group, index]));
  const memberOf = new Map<Group, Map<LogicalOp, number>>();
  const memberIn = (group: Group, op: LogicalOp) => {
    const found = memberOf.get(group) ?? new Map(group.members.map((member, index) => [member, index]));
    memberOf.set(group, found);
    return found.get(op) ?? -1;
  };
  const places = new Float64Array(layout.boxes.length * 4);
  const kinds = new Int32Array(layout.boxes.length * FIELDS);
  layout.boxes.forEach((box, i) => {
    places.set([box.x, box.y, box.w, box.h], i * 4);
    const member = box.op === null ? -1 : memberIn(box.group, box.op);
    kinds.set([indexOf.get(box.group) ?? 0, member, Number(box.expanded), box.parent, box.depth], i * FIELDS);
  });
  const edges = new Int32Array(layout.edges.length * 3);
  layout.edges.forEach((edge, i) => {
    edges.set([edge.from, edge.to, Number(edge.implied)], i * 3);
  });
  const { boxOfOp, groupBoxOfOp, width, height, down } = layout;
  const packed = hasGroups ? null : groups.map(packGroup);
  return { groups: packed, places, kinds, edges, boxOfOp, groupBoxOfOp, width, height, down };
}

function packGroup(group: Group): PackedGroup {
  const { members, ops, children, ...facts } = group;
  const memberStart = new Int32Array(members.length + 1);
  members.forEach((member, index) => {
    memberStart[index + 1] = (memberStart[index] ?? 0) + member.ops.length;
  });
  const memberOps = Int32Array.from(members.flatMap((member) => member.ops));
  const memberModules = members.map((member) => member.module);
  const positions = new Map(members.map((member, index) => [member, index]));
  return {
    ...facts,
    ops: Int32Array.from(ops),
    memberStart,
    memberOps,
    memberModules,
    children: children.map((child) => packPart(child, positions)),
  };
}

function packPart(group: Group, positions: ReadonlyMap<LogicalOp, number>): PackedPart {
  const { members, ops: _, children, ...facts } = group;
  return {
    ...facts,
    members: Int32Array.from(members, (member) => positions.get(member) ?? -1),
    children: children.map((child) => packPart(child, positions)),
  };
}

/** What `postMessage` may move instead of copying: of a plan without its groups, which are sent before it. */
export function transferable(packed: Omit<PackedPlan, "groups">): ArrayBuffer[] {
  const own = [packed.places, packed.kinds, packed.edges, packed.boxOfOp, packed.groupBoxOfOp];
  return own.map((array) => array.buffer as ArrayBuffer);
}

export const buffersOf = (group: PackedGroup): ArrayBuffer[] =>
  arraysOf(group).map((array) => array.buffer as ArrayBuffer);

const arraysOf = (group: PackedGroup): Int32Array[] => [
  group.ops,
  group.memberStart,
  group.memberOps,
  ...group.children.flatMap(partArrays),
];
const partArrays = (part: PackedPart): Int32Array[] => [part.members, ...part.children.flatMap(partArrays)];

/** `known`: the groups, if an earlier plan of the same document and replica brought them. */
export function unpackPlan(document: GraphDocument, packed: PackedPlan, known: readonly Group[] = []): Plan {
  const groups = packed.groups?.map((group) => unpackGroup(document, group)) ?? known;
  const every = everyGroup(groups);
  const { places, kinds } = packed;
  const boxes: Box[] = [];
  for (let i = 0; i * FIELDS < kinds.length; i++) {
    // By index: taking an array apart costs ten times as much, for each of 20 000 boxes.
    const kind = i * FIELDS;
    const place = i * 4;
    const group = every[kinds[kind] ?? 0] as Group;
    const op = group.members[kinds[kind + 1] ?? -1] ?? null;
    boxes.push({
      id: op?.id ?? group.id,
      group,
      op,
      expanded: kinds[kind + 2] === 1,
      parent: kinds[kind + 3] ?? -1,
      depth: kinds[kind + 4] ?? 0,
      x: places[place] ?? 0,
      y: places[place + 1] ?? 0,
      w: places[place + 2] ?? 0,
      h: places[place + 3] ?? 0,
    });
  }
  const edges: Edge[] = [];
  for (let i = 0; i < packed.edges.length; i += 3) {
    edges.push({ from: packed.edges[i] ?? 0, to: packed.edges[i + 1] ?? 0, implied: packed.edges[i + 2] === 1 });
  }
  const { boxOfOp, groupBoxOfOp, width, height, down } = packed;
  return { groups, layout: { boxes, edges, boxOfOp, groupBoxOfOp, width, height, down } };
}

export function unpackGroup(document: GraphDocument, packed: PackedGroup): Group {
  const { memberStart, memberOps, memberModules, ops, children, ...facts } = packed;
  const members: LogicalOp[] = [];
  for (let m = 0; m + 1 < memberStart.length; m++) {
    const of = numbers(memberOps, memberStart[m] ?? 0, memberStart[m + 1] ?? 0);
    members.push(logicalOp(document, of, memberModules[m] ?? "", packed.bucket));
  }
  return {
    ...facts,
    members,
    ops: numbers(ops, 0, ops.length),
    children: children.map((child) => unpackPart(child, members)),
  };
}

/** A loop, as spreading a typed array costs ten times as much. */
function numbers(of: Int32Array, from: number, to: number): number[] {
  const found = new Array<number>(to - from);
  for (let i = from; i < to; i++) found[i - from] = of[i] ?? 0;
  return found;
}

function unpackPart({ members: positions, children, ...facts }: PackedPart, of: readonly LogicalOp[]): Group {
  const members = numbers(positions, 0, positions.length).map((position) => of[position] as LogicalOp);
  const ops = members.flatMap((member) => member.ops);
  return { ...facts, members, ops, children: children.map((child) => unpackPart(child, of)) };
}
