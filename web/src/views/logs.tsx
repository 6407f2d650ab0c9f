/** The log of one replica: follows the end until the reader scrolls away, finds text, keeps 50 000 lines. */
import { useState } from "preact/hooks";
import { bytes, integer, plural } from "../format";
import { Empty } from "../parts/basics";
import { VirtualRows } from "../parts/rows";
import { setQuery, url } from "../router";
import type { JobStore } from "../store/job";
import type { ReplicaLog } from "../store/logs";

const ROW_PX = 18;

export function LogsView({ store }: { store: JobStore }) {
  store.logsVersion.value;
  const [text, setText] = useState("");
  const line = Number(url.value.searchParams.get("line") ?? -1);
  const [follow, setFollow] = useState(line < 0);
  const replicas = store.job.value?.replicas ?? [];
  const wanted = url.value.searchParams.get("replica");
  const replica =
    replicas.find((one) => one.id === wanted) ??
    replicas.find((one) => (store.logs.byReplica.get(one.id)?.lines.length ?? 0) > 0) ??
    replicas[0];
  const log = replica === undefined ? undefined : store.logs.byReplica.get(replica.id);
  const lines = log?.lines ?? [];
  const needle = text.toLowerCase();
  const found =
    needle === "" ? null : lines.flatMap((line, index) => (line.toLowerCase().includes(needle) ? [index] : []));
  return (
    <section class="panel" aria-labelledby="logs-title">
      <div class="panel-title">
        <h2 id="logs-title">Logs</h2>
        <select
          aria-label="Replica"
          value={replica?.id ?? ""}
          onChange={(event) => setQuery({ replica: event.currentTarget.value, line: null })}
        >
          {replicas.map((one) => (
            <option key={one.id} value={one.id}>
              {one.role}-{one.index} · attempt {one.attempt}
            </option>
          ))}
        </select>
        <em>{describe(log, found)}</em>
        <div class="tools">
          <input
            class="field"
            style={{ width: "220px", padding: "2px 8px" }}
            type="search"
            placeholder="Find in the log"
            aria-label="Find in the log"
            value={text}
            onInput={(event) => setText(event.currentTarget.value)}
          />
          <button
            type="button"
            class="btn small"
            aria-pressed={follow}
            onClick={() => setFollow(!follow)}
            data-testid="follow"
          >
            {follow ? "Following" : "Follow"}
          </button>
        </div>
      </div>
      {lines.length === 0 ? (
        <Empty title="No output yet">
          <span>What the process writes to stdout and stderr appears here.</span>
        </Empty>
      ) : (
        <VirtualRows
          count={found?.length ?? lines.length}
          rowHeight={ROW_PX}
          follow={follow && found === null}
          at={found === null ? line : -1}
          onFollow={setFollow}
          label="Log lines"
          testid="log"
          row={(index) => (
            <LogLine key={index} index={index} line={found?.[index] ?? index} log={log} needle={needle} at={line} />
          )}
        />
      )}
    </section>
  );
}

function describe(log: ReplicaLog | undefined, found: readonly number[] | null): string {
  if (log === undefined) return "";
  const parts = [
    found === null
      ? plural(log.lines.length, "line")
      : `${integer(found.length)} of ${plural(log.lines.length, "line")}`,
  ];
  if (log.dropped > 0) parts.push(`${plural(log.dropped, "older line")} not retained in the dashboard`);
  if (log.skippedBytes > 0) parts.push(`the first ${bytes(log.skippedBytes)} not loaded`);
  return parts.join(" · ");
}

function LogLine(props: { index: number; line: number; log: ReplicaLog | undefined; needle: string; at: number }) {
  const text = props.log?.lines[props.line] ?? "";
  return (
    <div
      class={props.line === props.at ? "logline is-at" : "logline"}
      style={{ top: `${props.index * ROW_PX}px` }}
      data-testid="log-line"
    >
      <span class="no" aria-hidden="true">
        {props.line + 1 + (props.log?.dropped ?? 0)}
      </span>
      <Marked text={text} needle={props.needle} />
    </div>
  );
}

function Marked({ text, needle }: { text: string; needle: string }) {
  const at = needle === "" ? -1 : text.toLowerCase().indexOf(needle);
  if (at < 0) return <>{text}</>;
  return (
    <>
      {text.slice(0, at)}
      <mark>{text.slice(at, at + needle.length)}</mark>
      {text.slice(at + needle.length)}
    </>
  );
}
