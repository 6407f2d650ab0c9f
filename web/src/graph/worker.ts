/** Parses large graph documents and lays them out, beside the page. One worker for the page's life. */
import type { GraphDocument } from "../types";
import { criticalChain, type FoundChain } from "./critical";
import {
  buffersOf,
  makePlan,
  type PackedGroup,
  type PackedPlan,
  type PlanRequest,
  packPlan,
  transferable,
} from "./plan";

export type WorkerRequest =
  | { readonly type: "parse"; readonly id: number; readonly text: ArrayBuffer }
  | { readonly type: "plan"; readonly id: number; readonly document: number; readonly request: PlanRequest }
  | { readonly type: "chain"; readonly id: number; readonly document: number; readonly meansNs: Float64Array }
  | { readonly type: "hold"; readonly id: number; readonly document: GraphDocument }
  | { readonly type: "forget"; readonly id: number };

/** A document and the groups of a plan come in pieces, each of which the page takes up within a frame. */
export type WorkerReply =
  | { readonly type: "head"; readonly id: number; readonly head: Omit<GraphDocument, "ops" | "edges"> }
  | { readonly type: "ops"; readonly id: number; readonly ops: GraphDocument["ops"] }
  | { readonly type: "edges"; readonly id: number; readonly edges: Int32Array }
  | { readonly type: "end"; readonly id: number }
  | { readonly type: "group"; readonly id: number; readonly group: PackedGroup }
  | { readonly type: "plan"; readonly id: number; readonly packed: PackedPlan; readonly ms: number }
  | { readonly type: "chain"; readonly id: number; readonly found: FoundChain }
  | { readonly type: "failed"; readonly id: number; readonly message: string };

const OPS_A_PIECE = 500;
const EDGES_A_PIECE = 5000;
/** Documents by the id of the request that brought them. */
const documents = new Map<number, GraphDocument>();
/** Replicas whose groups the page has, by document. */
const sent = new Map<number, Set<PlanRequest["replica"]>>();

const reply = (message: WorkerReply, transfer: Transferable[] = []): void => postMessage(message, { transfer });

function parse(id: number, text: ArrayBuffer): void {
  const document = JSON.parse(new TextDecoder().decode(text)) as GraphDocument;
  documents.set(id, document);
  const { ops, edges, ...head } = document;
  reply({ type: "head", id, head });
  for (let at = 0; at < ops.length; at += OPS_A_PIECE) reply({ type: "ops", id, ops: ops.slice(at, at + OPS_A_PIECE) });
  for (let at = 0; at < edges.length; at += EDGES_A_PIECE) {
    const flat = Int32Array.from(edges.slice(at, at + EDGES_A_PIECE).flat());
    reply({ type: "edges", id, edges: flat }, [flat.buffer]);
  }
  reply({ type: "end", id });
}

function held(document: number): GraphDocument {
  const found = documents.get(document);
  if (found === undefined) throw new Error(`the worker has no document ${document}`);
  return found;
}

function plan(id: number, document: number, request: PlanRequest): void {
  const found = held(document);
  const began = performance.now();
  const replicas = sent.get(document) ?? new Set();
  sent.set(document, replicas);
  const packed = packPlan(makePlan(found, request), replicas.has(request.replica));
  replicas.add(request.replica);
  const ms = performance.now() - began;
  for (const group of packed.groups ?? []) reply({ type: "group", id, group }, buffersOf(group));
  reply({ type: "plan", id, packed: { ...packed, groups: null }, ms }, transferable(packed));
}

function chain(id: number, document: number, meansNs: Float64Array): void {
  const found = criticalChain(held(document), meansNs);
  reply({ type: "chain", id, found }, [found.chain.buffer as ArrayBuffer]);
}

function forget(document: number): void {
  documents.delete(document);
  sent.delete(document);
}

addEventListener("message", (event: MessageEvent<WorkerRequest>) => {
  const asked = event.data;
  try {
    if (asked.type === "parse") parse(asked.id, asked.text);
    else if (asked.type === "hold") documents.set(asked.id, asked.document);
    else if (asked.type === "forget") forget(asked.id);
    else if (asked.type === "chain") chain(asked.id, asked.document, asked.meansNs);
    else plan(asked.id, asked.document, asked.request);
  } catch (error) {
    reply({ type: "failed", id: asked.id, message: String(error) });
  }
});
