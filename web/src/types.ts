/** What server and page say to each other (docs/protocol.md). REST shapes come from the server's OpenAPI. */

export type JobState =
  | "CREATED"
  | "QUEUED"
  | "STARTING"
  | "RUNNING"
  | "RECOVERING"
  | "STOPPING"
  | "SUCCEEDED"
  | "FAILED"
  | "CANCELLED";

export interface Replica {
  readonly id: string;
  readonly job_id: string;
  readonly attempt: number;
  readonly epoch: number;
  readonly role: string;
  readonly index: number;
  readonly state: string;
  readonly node_id: string | null;
  readonly host: string | null;
  readonly pid: number | null;
  readonly endpoint: string | null;
  readonly exit_code: number | null;
  readonly signal: number | null;
  readonly reason: string | null;
  readonly stream: number;
  readonly started_at: string | null;
  readonly finished_at: string | null;
  readonly graph_hash: string | null;
}

export interface Job {
  readonly id: string;
  readonly name: string;
  readonly kind: string;
  readonly state: JobState;
  readonly reason: string | null;
  readonly reason_detail: string | null;
  readonly spec: unknown;
  readonly epoch: number;
  readonly attempt: number;
  readonly created_at: string;
  readonly started_at: string | null;
  readonly finished_at: string | null;
  readonly progress: { readonly done: number; readonly total: number; readonly unit: string } | null;
  readonly eta_s: number | null;
  readonly latest: Readonly<Record<string, number | null>>;
  readonly why: string;
  readonly replicas: readonly Replica[];
  readonly version: number;
}

export interface NodeRow {
  readonly id: string;
  readonly name: string;
  readonly host: string;
  readonly state: string;
  readonly cpus: number;
  readonly gpus: number;
  readonly memory_bytes: number;
  readonly cpus_used: number;
  readonly last_seen_at: string | null;
  readonly version: string;
}

export interface EventRow {
  readonly id: string | number;
  readonly at: string;
  readonly kind: string;
  readonly subject: string;
  readonly from: string | null;
  readonly to: string | null;
  readonly reason: string | null;
  readonly detail: string | null;
}

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
  | { readonly type: "degraded"; readonly id: number; readonly reason: string }
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
