/**
 * The logs of a job: of all processes by time, or of one; follows the end until the reader scrolls away, finds text or
 * a regular expression, hands out a file. Retains 50 000 lines a process.
 */
import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { bytes, integer, plural } from "../format";
import { Empty } from "../parts/basics";
import { zoomOut } from "../parts/chart";
import { download } from "../parts/download";
import { VirtualRows } from "../parts/rows";
import { setQuery, url } from "../router";
import { brushOf, timesOf } from "../store/brush";
import { searchFor, type Wanted } from "../store/findremote";
import type { StepRange } from "../store/history";
import type { JobStore } from "../store/job";
import { type Listed, Listing, Search } from "../store/lines";
import type { LineOf, ReplicaLog } from "../store/logs";
import type { Job, Replica } from "../types";
import { LogRow, nameOf, ROW_PX, textOf } from "./loglines";

const ALL = "all";
const TONES = 6;

/** The process whose log is shown; null: all of them. A job of one process has no need of the others. */
function shownReplica(job: Job | null, logs: ReadonlyMap<string, ReplicaLog>): Replica | null {
  const replicas = job?.replicas ?? [];
  const wanted = url.value.searchParams.get("replica");
  const chosen = replicas.find((one) => one.id === wanted);
  if (chosen !== undefined) return chosen;
  const talking = replicas.filter((one) => (logs.get(one.id)?.lines.length ?? 0) > 0);
  return talking.length > 1 ? null : (talking[0] ?? replicas[0] ?? null);
}

export function LogsView({ store }: { store: JobStore }) {
  store.logsVersion.value;
  const query = url.value.searchParams;
  const wanted = wantedOf(query);
  const line = Number(url.value.searchParams.get("line") ?? -1);
  const [follow, setFollow] = useState(line < 0);
  const job = store.job.value;
  const logs = store.logs.byReplica;
  const replica = shownReplica(job, logs);
  const listing = useMemo(() => new Listing(), [store]);
  const search = useMemo(() => searchFor(wanted), [store, wanted.text, wanted.how]);
  useEffect(() => (search instanceof Search ? search.end : undefined), [search]);
  if (search instanceof Search) search.version.value;
  const listed = listing.of(replica?.id ?? null, logs);
  const brush = brushOf(query);
  const times = timesOf(store.series, brush);
  const lines = within(search instanceof Search ? search.among(listed.lines) : listed.lines, times);
  const failure = search instanceof Search ? search.error : search;
  const finds = search instanceof Search ? search : null;
  const isPart = finds !== null || times !== null;
  return (
    <section class="panel" aria-labelledby="logs-title">
      <div class="panel-title">
        <h2 id="logs-title">Logs</h2>
        <Which job={job} shown={replica} />
        <em
          key={failure === null ? "count" : "failure"}
          id="log-count"
          class={failure === null ? "clip" : "tone-bad"}
          role={failure === null ? undefined : "alert"}
          data-testid="log-count"
        >
          {failure ?? describe(lines.length, listed, isPart, logsOf(replica, logs))}
        </em>
        <div class="tools">
          {times !== null && <Brush steps={brush} />}
          <Find wanted={wanted} change={setWanted} isWrong={failure !== null} />
          <button
            type="button"
            class="btn small"
            aria-pressed={follow}
            onClick={() => setFollow(!follow)}
            data-testid="follow"
          >
            {follow ? "Following" : "Follow"}
          </button>
          <Save store={store} replica={replica} lines={lines} finds={finds !== null} />
        </div>
      </div>
      <NoneOfSteps times={times} lines={lines} />
      {listed.total === 0 ? (
        <Empty title="No output yet">
          <span>What the processes write to stdout and stderr appears here.</span>
        </Empty>
      ) : (
        <VirtualRows
          count={lines.length}
          rowHeight={ROW_PX}
          follow={follow && !isPart}
          at={!isPart && replica !== null ? line : -1}
          onFollow={setFollow}
          label="Log lines"
          testid="log"
          row={(index) => rowOf(index, lines[index], { job, replica, line, search: finds })}
        />
      )}
    </section>
  );
}

function NoneOfSteps({ times, lines }: { times: readonly [number, number] | null; lines: readonly LineOf[] }) {
  if (times === null || lines.length > 0) return null;
  return <Empty title="No such line came while these steps ran" />;
}

/** The steps whose lines are shown, and a way back to all lines. */
function Brush({ steps }: { steps: StepRange | null }) {
  if (steps === null) return null;
  return (
    <button type="button" class="btn small" onClick={() => zoomOut("step")} data-testid="log-steps">
      Steps {integer(steps.first)} to {integer(steps.last)} ✕
    </button>
  );
}

const wantedOf = (query: URLSearchParams): Wanted => ({
  text: query.get("find") ?? "",
  how: query.get("re") === "1" ? "expression" : "text",
});

/** Changes what is looked for, which the address has. */
const setWanted = ({ text, how }: Wanted): void =>
  setQuery({ find: text === "" ? null : text, re: how === "expression" ? "1" : null });

/** The lines that came while some steps ran; all without these. */
function within(lines: readonly LineOf[], times: readonly [number, number] | null): readonly LineOf[] {
  if (times === null) return lines;
  return lines.filter(({ log, line }) => (log.times[line] ?? 0) > times[0] && (log.times[line] ?? 0) <= times[1]);
}

interface Shown {
  readonly job: Job | null;
  readonly replica: Replica | null;
  readonly line: number;
  readonly search: Search | null;
}

function rowOf(index: number, at: LineOf | undefined, { job, replica, line, search }: Shown) {
  if (at === undefined) return null;
  const place = job?.replicas.findIndex((one) => one.id === at.replicaId) ?? -1;
  const of = job?.replicas[place];
  const who = replica === null && of !== undefined ? { name: nameOf(of), tone: place % TONES } : null;
  const isAt = replica !== null && at.line === line;
  return <LogRow key={index} index={index} at={at} isAt={isAt} found={search?.span(at) ?? null} who={who} />;
}

function Find(props: { wanted: Wanted; change: (to: Wanted) => void; isWrong: boolean }) {
  const { text, how } = props.wanted;
  return (
    <>
      <input
        class="field log-find"
        type="search"
        placeholder={how === "text" ? "Find in the log" : "Regular expression"}
        aria-label="Find in the log"
        aria-invalid={props.isWrong}
        aria-describedby={props.isWrong ? "log-count" : undefined}
        value={text}
        onInput={(event) => props.change({ how, text: event.currentTarget.value })}
      />
      <button
        type="button"
        class="btn small mono"
        aria-pressed={how === "expression"}
        aria-label="Regular expression"
        title="Regular expression"
        onClick={() => props.change({ text, how: how === "text" ? "expression" : "text" })}
        data-testid="log-expression"
      >
        .*
      </button>
    </>
  );
}

interface SaveProps {
  readonly store: JobStore;
  readonly replica: Replica | null;
  readonly lines: readonly LineOf[];
  readonly finds: boolean;
}

/** One process's log as the server has it; of several, or of what was found, the lines that are shown. */
function Save({ store, replica, lines, finds }: SaveProps) {
  const [failure, setFailure] = useState<ApiError | null>(null);
  const job = store.job.value;
  const save = async () => {
    setFailure(null);
    const names = new Map((job?.replicas ?? []).map((one) => [one.id, nameOf(one)]));
    const name = `${job?.name ?? "job"}-${replica === null ? "all" : nameOf(replica)}.log`;
    try {
      if (replica === null) download(name, [textOf(lines, names)]);
      else download(name, finds ? [textOf(lines, null)] : await wholeLog(store.jobId, replica.id));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setFailure(error);
    }
  };
  return (
    <>
      <button
        type="button"
        class="btn small"
        disabled={lines.length === 0}
        title={finds || replica === null ? "The lines that are shown" : "All that the server retains"}
        onClick={() => void save()}
        data-testid="save"
      >
        Download
      </button>
      {failure !== null && (
        <span class="tone-bad" role="alert">
          {failure.message}
        </span>
      )}
    </>
  );
}

function Which({ job, shown }: { job: Job | null; shown: Replica | null }) {
  const replicas = job?.replicas ?? [];
  return (
    <select
      aria-label="Process"
      value={shown?.id ?? ALL}
      onChange={(event) => setQuery({ replica: event.currentTarget.value, line: null })}
      data-testid="log-of"
    >
      {(replicas.length > 1 || shown === null) && <option value={ALL}>all processes, by time</option>}
      {replicas.map((one) => (
        <option key={one.id} value={one.id}>
          {nameOf(one)} · attempt {one.attempt}
        </option>
      ))}
    </select>
  );
}

const logsOf = (replica: Replica | null, logs: ReadonlyMap<string, ReplicaLog>): ReplicaLog[] =>
  replica === null ? [...logs.values()] : [logs.get(replica.id)].filter((one) => one !== undefined);

function describe(shown: number, { lines, total }: Listed, finds: boolean, logs: readonly ReplicaLog[]): string {
  const parts = [finds ? `${integer(shown)} of ${plural(lines.length, "line")}` : plural(total, "line")];
  const unlisted = total - lines.length;
  if (unlisted > 0) parts.push(`${plural(unlisted, "older line")} not ${finds ? "searched" : "shown"}`);
  const dropped = logs.reduce((sum, log) => sum + log.dropped, 0);
  const skipped = logs.reduce((sum, log) => sum + log.skippedBytes, 0);
  if (dropped > 0) parts.push(`${plural(dropped, "older line")} not retained in the dashboard`);
  if (skipped > 0) parts.push(`the first ${bytes(skipped)} not loaded`);
  return parts.join(" · ");
}

/** All that the server has of a log, in the pieces that it gives. */
async function wholeLog(jobId: string, replicaId: string): Promise<string[]> {
  const parts: string[] = [];
  let offset = 0;
  for (;;) {
    const piece = await api.log(jobId, replicaId, offset);
    if (piece.next_offset <= offset) return parts;
    parts.push(piece.text);
    offset = piece.next_offset;
  }
}
