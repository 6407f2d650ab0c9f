/** REST calls. Every failure becomes an `ApiError` that says what was asked, what came back and what to do. */
import type { Wish } from "./store/joblist";
import type { Grant } from "./store/tokens";
import type {
  Advice,
  Diagnosis,
  EventRow,
  FullRecording,
  GraphUse,
  Job,
  JobCounts,
  LogChunk,
  Me,
  MediaContent,
  MediaSeries,
  NodeLoad,
  NodeRow,
  OperatorTimes,
  Page,
  PilotRow,
  Problem,
  PythonStacks,
  SeriesSet,
  TelemetryCompleteness,
  TokenMade,
  TokenRow,
  WebhookDelivery,
  WebhookMade,
  WebhookRow,
} from "./types";

const BASE = "/api/v1";

export class ApiError extends Error {
  override readonly name = "ApiError";
  constructor(
    readonly status: number,
    message: string,
    readonly hint: string | null = null,
    readonly code: string | null = null,
  ) {
    super(message);
  }
}

async function request(method: string, path: string, body?: unknown): Promise<Response> {
  const init: RequestInit = { method, credentials: "same-origin", headers: { Accept: "application/json" } };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { ...init.headers, "Content-Type": "application/json" };
  }
  let response: Response;
  try {
    response = await fetch(BASE + path, init);
  } catch (cause) {
    const error = new ApiError(0, `The server did not answer ${method} ${path}.`, "Is `penstock up` still running?");
    error.cause = cause;
    throw error;
  }
  if (!response.ok) throw await failure(method, path, response);
  return response;
}

async function failure(method: string, path: string, response: Response): Promise<ApiError> {
  let problem: Partial<Problem> = {};
  if (response.headers.get("content-type")?.includes("json")) problem = (await response.json()) as Partial<Problem>;
  const text = problem.detail ?? problem.title ?? `${method} ${path} answered ${response.status}.`;
  return new ApiError(response.status, text, problem.hint ?? null, problem.code ?? null);
}

const get = <T>(path: string): Promise<T> => answer<T>("GET", path);

async function answer<T>(...asked: Parameters<typeof request>): Promise<T> {
  const response = await request(...asked);
  try {
    return (await response.json()) as T;
  } catch (cause) {
    const error = new ApiError(0, `The answer to ${asked[0]} ${asked[1]} broke off or is no JSON.`);
    error.cause = cause;
    throw error;
  }
}

async function bytes(path: string): Promise<ArrayBuffer> {
  const response = await request("GET", path);
  try {
    return await response.arrayBuffer();
  } catch (cause) {
    const error = new ApiError(0, `The answer to GET ${path} broke off.`);
    error.cause = cause;
    throw error;
  }
}

const enc = encodeURIComponent;

export const api = {
  me: () => get<Me>("/me"),
  login: async (code: string): Promise<void> => void (await request("POST", "/session", { code })),
  logout: async (): Promise<void> => void (await request("DELETE", "/session")),
  cancel: (jobId: string) => answer<Job>("POST", `/jobs/${enc(jobId)}:cancel`),
  submit: (spec: Job["spec"]) => answer<Job>("POST", "/jobs", { spec }),
  job: (jobId: string) => get<Job>(`/jobs/${enc(jobId)}`),
  findJobs: ({ sort, text }: Wish, states: readonly string[], pageToken: string | null) => {
    const query = new URLSearchParams({ page_size: "100", order: sort, words: text });
    if (states.length > 0) query.set("state", states.join());
    if (pageToken !== null) query.set("page_token", pageToken);
    return get<Page<Job>>(`/jobs?${query}`);
  },
  jobCounts: (words: string) => get<JobCounts>(`/job-counts?words=${enc(words)}`),
  nodes: () => get<Page<NodeRow>>("/nodes?page_size=200"),
  wantNode: (id: string, what: "cordon" | "uncordon") => answer<NodeRow>("POST", `/nodes/${enc(id)}:${what}`),
  /** `deadlineS`: after which what still runs there is preempted; null: it is waited for. */
  drainNode: (id: string, deadlineS: number | null) =>
    answer<NodeRow>("POST", `/nodes/${enc(id)}:drain`, { deadline_s: deadlineS }),
  nodeLoads: () => get<{ readonly items: readonly NodeLoad[] }>("/node-loads"),
  pilots: () => get<{ readonly items: readonly PilotRow[] }>("/pilots"),
  tokens: () => get<{ readonly items: readonly TokenRow[] }>("/tokens"),
  createToken: (asked: { readonly name: string } & Grant) => answer<TokenMade>("POST", "/tokens", asked),
  revokeToken: async (id: string): Promise<void> => void (await request("DELETE", `/tokens/${enc(id)}`)),
  webhooks: () => get<{ readonly items: readonly WebhookRow[] }>("/webhooks"),
  createWebhook: (url: string, project: string | null) => answer<WebhookMade>("POST", "/webhooks", { url, project }),
  testWebhook: (id: string) => answer<WebhookDelivery>("POST", `/webhooks/${enc(id)}:test`),
  enableWebhook: (id: string) => answer<WebhookRow>("POST", `/webhooks/${enc(id)}:enable`),
  removeWebhook: async (id: string): Promise<void> => void (await request("DELETE", `/webhooks/${enc(id)}`)),
  events: (jobId: string) => get<Page<EventRow>>(`/jobs/${enc(jobId)}/events?page_size=200`),
  completeness: (jobId: string) => get<TelemetryCompleteness>(`/jobs/${enc(jobId)}/completeness`),
  why: (jobId: string) => get<Diagnosis>(`/jobs/${enc(jobId)}/why`),
  record: (jobId: string, seconds: number) =>
    answer<FullRecording>("POST", `/jobs/${enc(jobId)}:record?seconds=${seconds}`),
  stacks: (jobId: string, replicaId: string, skip: number) =>
    answer<PythonStacks>("POST", `/jobs/${enc(jobId)}:stack?replica_id=${enc(replicaId)}&skip=${skip}`),
  advice: (jobId: string) => get<Advice>(`/jobs/${enc(jobId)}/advice`),
  metrics: (jobId: string) => get<{ readonly series: SeriesSet }>(`/jobs/${enc(jobId)}/metrics?max_points=2000`),
  media: (jobId: string) => get<{ readonly items: readonly MediaSeries[] }>(`/jobs/${enc(jobId)}/media`),
  mediaContent: (jobId: string, id: string) => get<MediaContent>(`/jobs/${enc(jobId)}/media/${enc(id)}`),
  operators: (jobId: string) => get<OperatorTimes>(`/jobs/${enc(jobId)}/operators`),
  loss: (jobId: string, points: number) =>
    get<{ readonly series: SeriesSet }>(`/jobs/${enc(jobId)}/metrics?names=loss&max_points=${points}`),
  /** A piece of a log, whole megabytes at once. */
  log: (jobId: string, replicaId: string, offset: number) =>
    get<LogChunk>(`/jobs/${enc(jobId)}/logs?replica_id=${enc(replicaId)}&offset=${offset}&limit=${1 << 20}`),
  graphs: (jobId: string) => get<{ readonly items: readonly GraphUse[] }>(`/jobs/${enc(jobId)}/graphs`),
  /** Recorded frames of a stream, each behind its length. */
  frames: (jobId: string, of: number, afterSeq: bigint | null, limitBytes: number, kinds: readonly number[]) =>
    bytes(
      `/jobs/${enc(jobId)}/frames?stream=${of}&kinds=${kinds.join()}&limit_bytes=${limitBytes}${afterSeq === null ? "" : `&after_seq=${afterSeq}`}`,
    ),
  /** The bytes of a graph document's JSON: a large one is not parsed on the main thread. */
  graph: (hash: string) => bytes(`/graphs/${enc(hash)}`),
};
