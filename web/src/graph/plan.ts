/**
 * Groups and their layout together, and the same as flat arrays for the way out of a worker.
 *
 * A plan of 20 000 operators as objects takes the receiver longer to copy than a frame may take; packed it is
 * transferred, and unpacked beside the document that both sides have.
 */
import { shortType } from "../format";
import type { GraphDocument } from "../types";
import { type Bucket, type Group, groupOps, type LogicalOp } from "./group";
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

interface PackedGroup {
  readonly id: string;
  readonly label: string;
  readonly sub: string;
  readonly bucket: Bucket;
  readonly module: string;
  readonly afterUpdate: boolean;
  readonly ops: Int32Array;
  /** Operators of member `m`: `memberOps[memberStart[m]] … memberOps[memberStart[m + 1] - 1]`. */
  readonly memberStart: Int32Array;
  readonly memberOps: Int32Array;
}

export interface PackedPlan {
  readonly groups: readonly PackedGroup[];
  /** x, y, w, h of each box. */
  readonly places: Float64Array;
  /** Group, member (-1: the group's own box) and whether it is expanded, of each box. */
  readonly kinds: Int32Array;
  /** From, to, implied of each edge. */
  readonly edges: Int32Array;
  readonly boxOfOp: Int32Array;
  readonly groupBoxOfOp: Int32Array;
  readonly width: number;
  readonly height: number;
  readonly down: boolean;
}

export function packPlan({ groups, layout }: Plan): PackedPlan {
  const indexOf = new Map(groups.map((group, index) => [group, index]));
  const memberOf = new Map(groups.flatMap((group) => group.members.map((member, index) => [member, index] as const)));
  const places = new Float64Array(layout.boxes.length * 4);
  const kinds = new Int32Array(layout.boxes.length * 3);
  layout.boxes.forEach((box, i) => {
    places.set([box.x, box.y, box.w, box.h], i * 4);
    const member = box.op === null ? -1 : (memberOf.get(box.op) ?? -1);
    kinds.set([indexOf.get(box.group) ?? 0, member, Number(box.expanded)], i * 3);
  });
  const edges = new Int32Array(layout.edges.length * 3);
  layout.edges.forEach((edge, i) => {
    edges.set([edge.from, edge.to, Number(edge.implied)], i * 3);
  });
  const { boxOfOp, groupBoxOfOp, width, height, down } = layout;
  return { groups: groups.map(packGroup), places, kinds, edges, boxOfOp, groupBoxOfOp, width, height, down };
}

function packGroup(group: Group): PackedGroup {
  const { members, ops, ...facts } = group;
  const memberStart = new Int32Array(members.length + 1);
  members.forEach((member, index) => {
    memberStart[index + 1] = (memberStart[index] ?? 0) + member.ops.length;
  });
  const memberOps = Int32Array.from(members.flatMap((member) => member.ops));
  return { ...facts, ops: Int32Array.from(ops), memberStart, memberOps };
}

/** What `postMessage` may move instead of copying. */
export function transferable(packed: PackedPlan): ArrayBuffer[] {
  const own = [packed.places, packed.kinds, packed.edges, packed.boxOfOp, packed.groupBoxOfOp];
  const arrays = [...own, ...packed.groups.flatMap((group) => [group.ops, group.memberStart, group.memberOps])];
  return arrays.map((array) => array.buffer as ArrayBuffer);
}

export function unpackPlan(document: GraphDocument, packed: PackedPlan): Plan {
  const groups = packed.groups.map((group) => unpackGroup(document, group));
  const { places, kinds } = packed;
  const boxes: Box[] = [];
  for (let i = 0; i * 3 < kinds.length; i++) {
    const group = groups[kinds[i * 3] ?? 0] as Group;
    const op = group.members[kinds[i * 3 + 1] ?? -1] ?? null;
    const [x = 0, y = 0, w = 0, h = 0] = places.subarray(i * 4, i * 4 + 4);
    boxes.push({ id: op?.id ?? group.id, group, op, expanded: kinds[i * 3 + 2] === 1, x, y, w, h });
  }
  const edges: Edge[] = [];
  for (let i = 0; i < packed.edges.length; i += 3) {
    edges.push({ from: packed.edges[i] ?? 0, to: packed.edges[i + 1] ?? 0, implied: packed.edges[i + 2] === 1 });
  }
  const { boxOfOp, groupBoxOfOp, width, height, down } = packed;
  return { groups, layout: { boxes, edges, boxOfOp, groupBoxOfOp, width, height, down } };
}

function unpackGroup(document: GraphDocument, packed: PackedGroup): Group {
  const { memberStart, memberOps, ops, ...facts } = packed;
  const members: LogicalOp[] = [];
  for (let m = 0; m + 1 < memberStart.length; m++) {
    const of = [...memberOps.subarray(memberStart[m], memberStart[m + 1])];
    const op = document.ops[of[0] ?? -1];
    if (op === undefined) continue;
    members.push({
      id: `op|${op.name}|${op.kind}|${of[0] ?? 0}`,
      name: op.name,
      type: shortType(op.type),
      bucket: packed.bucket,
      ops: of,
    });
  }
  return { ...facts, members, ops: [...ops] };
}
