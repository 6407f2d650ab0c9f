/** What became of the telemetry that the job produced: the equation in the configuration, and a mark where it fails. */
import { effect, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { clock, integer } from "../format";
import { Head, Link } from "../parts/basics";
import { jobHref } from "../router";
import { terms, unexplained } from "../store/completeness";
import { isTerminal, type JobStore } from "../store/job";
import { nowMs } from "../store/session";
import type { CountedRows, TelemetryCompleteness } from "../types";

const KINDS: Readonly<Record<string, string>> = {
  OP_EVENTS: "operator events",
  OP_SUMS: "rows of operator sums",
  SYNC: "rows of gradient exchange",
  INPUT_EVENTS: "input events",
};

/** Asks for the counts while the page of a job is open; a banner if they do not add up. */
export function CompletenessMark({ store }: { store: JobStore }) {
  useEffect(
    () =>
      effect(() => {
        const [now, job] = [nowMs.value, store.job.value];
        untracked(() => void (job !== null && store.completeness.tick(now, !isTerminal(job))));
      }),
    [store],
  );
  const found = store.completeness.found.value;
  if (found === null || found.holds) return null;
  const words = found.rows.filter((one) => one.unexplained !== 0).map((one) => `${nameOf(one)}: ${unexplained(one)}`);
  return (
    <div class="banner bad" role="alert" data-testid="incomplete">
      The counts of this job's telemetry do not add up: {words.join(" · ") || "parts cancel out"}.{" "}
      <Link class="btn small" href={jobHref(store.jobId, "config")}>
        Counts
      </Link>
    </div>
  );
}

export function CompletenessCard({ store }: { store: JobStore }) {
  const found = store.completeness.found.value;
  if (found === null || found.processes.length === 0) return null;
  const isLeast = found.processes.some((one) => one.unknown_since !== null);
  return (
    <section aria-labelledby="completeness-title">
      <h3 id="completeness-title" style={{ margin: "8px 0" }}>
        Telemetry <small class="muted">produced = shown + sampled out + dropped, over the whole job</small>
      </h3>
      <div class="card" style={{ marginBottom: "16px" }} data-testid="completeness">
        {found.rows.map((rows) => (
          <Equation key={rows.kind} rows={rows} isLeast={isLeast} />
        ))}
        <Processes found={found} />
      </div>
    </section>
  );
}

/** `isLeast`: a process made no last report, so more may have been produced. */
function Equation({ rows, isLeast }: { rows: CountedRows; isLeast: boolean }) {
  const wrong = unexplained(rows);
  const why = terms(rows).filter((term) => term.why !== "");
  return (
    <p class="equation" data-kind={rows.kind}>
      {isLeast && "at least "}
      <b>{integer(rows.produced)}</b> {nameOf(rows)} produced {wrong === "" ? "=" : "≠"}{" "}
      {terms(rows).map((term, index) => (
        <span key={term.name}>
          {index > 0 && " + "}
          <b>{integer(term.rows)}</b> {term.name}
        </span>
      ))}
      {why.map((term) => (
        <small key={term.name} class="muted">
          {term.name}: {term.why}
        </small>
      ))}
      {wrong !== "" && <strong class="tone-bad">{wrong}</strong>}
    </p>
  );
}

/** The processes of which not all is known, or whose counts do not add up; of the others there is nothing to say. */
function Processes({ found }: { found: TelemetryCompleteness }) {
  const odd = found.processes.filter((one) => one.unknown_since !== null || one.rows.some((rows) => rows.unexplained));
  if (odd.length === 0) return null;
  return (
    <table data-testid="unknown-counts">
      <Head columns={["Process", ["Attempt", "num"], "Counts"]} />
      <tbody>
        {odd.map((one) => (
          <tr key={one.replica_id}>
            <td>{`${one.role}-${one.index}`}</td>
            <td class="num">{one.attempt}</td>
            <td>
              {one.unknown_since !== null &&
                (one.reported_at === null
                  ? `unknown since ${clock(one.unknown_since)}: it has reported none`
                  : `unknown since ${clock(one.unknown_since)}: at least what is shown here was produced`)}
              {one.rows.map(unexplained).filter(Boolean).join(" · ")}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const nameOf = (rows: CountedRows): string => KINDS[rows.kind] ?? rows.kind;
