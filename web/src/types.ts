/**
 * What server and page say to each other (docs/protocol.md). REST shapes are generated from the server's OpenAPI;
 * websocket messages and the graph document (core/penstock/protocol/graphdoc.py) are not in it and are written here.
 */
import type { components } from "./api.d";

type Schemas = components["schemas"];

export type Job = Schemas["Job"];
export type Replica = Schemas["Replica"];
export type NodeRow = Schemas["Node"];
export type EventRow = Schemas["Event"];
export type Me = Schemas["Me"];
export type Problem = Schemas["ProblemBody"];

export interface Page<T> {
  readonly items: readonly T[];
  readonly next_page_token: string | null;
}

export interface SeriesDelta {
  readonly step: readonly number[];
  readonly time_ns: readonly number[];
  readonly value: readonly (number | null)[];
}
export type SeriesSet = Readonly<Record<string, SeriesDelta>>;

export interface GraphUse {
  readonly replica_id: string;
  readonly stream: number;
  readonly hash: string;
}

export type ServerMessage =
  | {
      readonly type: "snapshot";
      readonly id: number;
      readonly jobs: readonly Job[];
      /** How many jobs there are, and whether some are older than these; a server may leave both out. */
      readonly total?: number;
      readonly more?: boolean;
      readonly nodes?: readonly NodeRow[];
    }
  | { readonly type: "nodes"; readonly id: number; readonly nodes: readonly NodeRow[] }
  | {
      readonly type: "snapshot";
      readonly id: number;
      readonly job: Job;
      readonly metrics?: SeriesSet;
      readonly graphs?: readonly GraphUse[];
      readonly nodes?: readonly NodeRow[];
    }
  | { readonly type: "job"; readonly id: number; readonly job: Job }
  | { readonly type: "metrics"; readonly id: number; readonly series: SeriesSet }
  | {
      readonly type: "log";
      readonly id: number;
      readonly replica_id: string;
      readonly offset: number;
      readonly text: string;
    }
  | ({ readonly type: "graph"; readonly id: number } & GraphUse)
  | { readonly type: "gap"; readonly id: number; readonly dropped: Readonly<Record<string, number>> }
  | { readonly type: "degraded"; readonly id: number; readonly reason: string | null }
  | { readonly type: "event"; readonly id: number; readonly event: EventRow }
  | { readonly type: "error"; readonly id: number; readonly detail: string };

export type OpRole = "forward" | "backward" | "optimize" | "lr_sched" | "loss" | "communication" | "input";
export type OpKind =
  | "computation"
  | "scale_loss_grad"
  | "all_reduce"
  | "reduce"
  | "broadcast"
  | "gather"
  | "fetch"
  | "feed"
  | "rpc";

export interface GraphValue {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
}

export interface GraphOp {
  readonly name: string;
  readonly type: string;
  readonly kind: OpKind;
  readonly role: OpRole;
  readonly replica: number;
  readonly module: string;
  readonly source: string;
  readonly inputs: readonly GraphValue[];
  readonly outputs: readonly GraphValue[];
  readonly bytes: number;
  readonly flops: number;
}

export interface GraphSync {
  readonly parameter: string;
  readonly gradient: string;
  readonly mode: "all_reduce" | "reduce";
  readonly owner: number;
  readonly bytes: number;
  readonly sparse: boolean;
  readonly ops: readonly number[];
}

export interface GraphDocument {
  readonly version: 1;
  readonly program: string;
  readonly mode: "local" | "all_reduce" | "reduce";
  readonly num_replicas: number;
  readonly num_threads: number;
  readonly batch: readonly number[];
  readonly ops: readonly GraphOp[];
  readonly edges: readonly (readonly [number, number])[];
  readonly syncs: readonly GraphSync[];
}
