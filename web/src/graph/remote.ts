/**
 * Where graphs are parsed and laid out: small ones here, within a few milliseconds; large ones in a worker, so that
 * they never block the main thread. The worker is started by the first large graph.
 */
import { ApiError, api } from "../api";
import type { GraphDocument, GraphOp } from "../types";
import { type CriticalPath, criticalPath, pathOf } from "./critical";
import type { Group } from "./group";
import { makePlan, type Plan, type PlanRequest, unpackGroup, unpackPlan } from "./plan";
import type { WorkerReply, WorkerRequest } from "./worker";

/** A document of this many bytes takes some 10 ms to parse. */
const LARGE_BYTES = 600_000;
/** A graph of this many operators is laid out in the worker, however small its document is. */
const MANY_OPS = 2000;

interface Waiting {
  readonly onReply: (reply: WorkerReply) => void;
  readonly onFailure: (error: ApiError) => void;
}

class GraphWorker {
  /** Milliseconds that the newest layout took in the worker. */
  layoutMs = Number.NaN;
  #worker: Worker | null = null;
  #waiting = new Map<number, Waiting>();
  #nextId = 1;
  /** Documents that the worker holds, by the id under which it does. */
  #ids = new WeakMap<GraphDocument, number>();
  /** Groups that the worker has sent, which it does once. */
  #groups = new WeakMap<GraphDocument, Map<PlanRequest["replica"], readonly Group[]>>();
  /** The worker lets go of a document when nothing here holds it any more. */
  #gone = new FinalizationRegistry<number>((id) => this.#worker?.postMessage({ type: "forget", id }));

  holds(document: GraphDocument): boolean {
    return this.#ids.has(document);
  }

  parse(text: ArrayBuffer): Promise<GraphDocument> {
    const id = this.#nextId++;
    let head: Omit<GraphDocument, "ops" | "edges"> | null = null;
    const ops: GraphOp[] = [];
    const edges: [number, number][] = [];
    return this.#ask<GraphDocument>({ type: "parse", id, text }, [text], (reply) => {
      if (reply.type === "head") head = reply.head;
      if (reply.type === "ops") ops.push(...reply.ops);
      if (reply.type === "edges") addPairs(edges, reply.edges);
      if (reply.type !== "end" || head === null) return undefined;
      const document: GraphDocument = { ...head, ops, edges };
      this.#ids.set(document, id);
      this.#gone.register(document, id);
      return document;
    });
  }

  /** Give the worker a copy of a document that was made here. */
  lend(document: GraphDocument): void {
    const id = this.#nextId++;
    this.#started().postMessage({ type: "hold", id, document });
    this.#ids.set(document, id);
    this.#gone.register(document, id);
  }

  plan(document: GraphDocument, request: PlanRequest): Promise<Plan> {
    const held = this.#ids.get(document) ?? -1;
    const sent: Group[] = [];
    return this.#ask<Plan>({ type: "plan", id: this.#nextId++, document: held, request }, [], (reply) => {
      if (reply.type === "group") sent.push(unpackGroup(document, reply.group));
      if (reply.type !== "plan") return undefined;
      this.layoutMs = reply.ms;
      const kept = this.#groups.get(document) ?? new Map<PlanRequest["replica"], readonly Group[]>();
      this.#groups.set(document, kept);
      const plan = unpackPlan(document, reply.packed, sent.length > 0 ? sent : kept.get(request.replica));
      kept.set(request.replica, plan.groups);
      return plan;
    });
  }

  criticalPath(document: GraphDocument, meansNs: Float64Array): Promise<CriticalPath> {
    const held = this.#ids.get(document) ?? -1;
    const request: WorkerRequest = { type: "chain", id: this.#nextId++, document: held, meansNs };
    return this.#ask<CriticalPath>(request, [meansNs.buffer as ArrayBuffer], (reply) =>
      reply.type === "chain" ? pathOf(reply.found) : undefined,
    );
  }

  #ask<T>(request: WorkerRequest, transfer: Transferable[], finish: (reply: WorkerReply) => T | undefined): Promise<T> {
    return new Promise((resolve, reject) => {
      this.#waiting.set(request.id, {
        onReply: (reply) => {
          const result = finish(reply);
          if (result === undefined) return;
          this.#waiting.delete(request.id);
          resolve(result);
        },
        onFailure: reject,
      });
      this.#started().postMessage(request, transfer);
    });
  }

  #started(): Worker {
    if (this.#worker !== null) return this.#worker;
    const worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module" });
    worker.onmessage = (event: MessageEvent<WorkerReply>) => {
      const one = this.#waiting.get(event.data.id);
      if (event.data.type === "failed") this.#fail([event.data.id], event.data.message);
      else one?.onReply(event.data);
    };
    worker.onerror = (event) => {
      this.#worker = null;
      // Its documents are gone with it: another layout of them is made here.
      this.#ids = new WeakMap();
      this.#groups = new WeakMap();
      this.#fail([...this.#waiting.keys()], event.message);
    };
    this.#worker = worker;
    return worker;
  }

  #fail(ids: readonly number[], message: string): void {
    for (const id of ids) {
      this.#waiting.get(id)?.onFailure(new ApiError(0, `The graph could not be prepared: ${message}`));
      this.#waiting.delete(id);
    }
  }
}

function addPairs(pairs: [number, number][], flat: Int32Array): void {
  for (let i = 0; i < flat.length; i += 2) pairs.push([flat[i] ?? 0, flat[i + 1] ?? 0]);
}

export const graphWorker = new GraphWorker();

/** Fetch a graph document. Raises ApiError. */
export async function loadDocument(hash: string): Promise<GraphDocument> {
  const content = await api.graph(hash);
  if (content.byteLength >= LARGE_BYTES) return graphWorker.parse(content);
  try {
    return JSON.parse(new TextDecoder().decode(content)) as GraphDocument;
  } catch (cause) {
    const error = new ApiError(0, `The answer to GET /graphs/${hash} broke off or is no JSON.`);
    error.cause = cause;
    throw error;
  }
}

/** The critical path at once if the document is small, else when the worker has it. `meansNs` is given away. */
export function pathThrough(document: GraphDocument, meansNs: Float64Array): CriticalPath | Promise<CriticalPath> {
  return graphWorker.holds(document) ? graphWorker.criticalPath(document, meansNs) : criticalPath(document, meansNs);
}

/** The plan at once if the document is small, else when the worker has it. */
export function planGraph(document: GraphDocument, request: PlanRequest): Plan | Promise<Plan> {
  if (document.ops.length > MANY_OPS && !graphWorker.holds(document)) graphWorker.lend(document);
  return graphWorker.holds(document) ? graphWorker.plan(document, request) : makePlan(document, request);
}
