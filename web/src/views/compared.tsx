/** Jobs beside each other: the settings in which they differ, and the times of their operators. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { clock, integer, nanos, plural } from "../format";
import { type Column, ErrorCard, Head } from "../parts/basics";
import { jobsStore } from "../store/current";
import { comparison, type Difference, remarks } from "../store/differences";
import type { JobStore } from "../store/job";
import { compared } from "../store/optimes";
import { type Answered, answeredFor, readTimes, type TimesRead } from "../store/optimesread";
import { shortId } from "../store/runs";
import type { Job } from "../types";

const MOST_OPERATORS = 40;

export const runName = (job: Job): string => `${job.name} ${clock(job.created_at)}`;

export function Compared({ store, ids }: { store: JobStore; ids: readonly string[] }) {
  const own = store.job.value;
  const jobs = jobsStore.value;
  const wanted = ids.filter((id) => id !== own?.id);
  const isThere = jobs !== null && jobs.jobs.value !== null;
  useEffect(() => {
    if (isThere) void jobs.lookUp(wanted);
  }, [jobs, isThere, wanted.join()]);
  if (own === null || !isThere || wanted.length === 0) return null;
  const others = wanted.flatMap((id) => jobs.find(id) ?? []);
  const names = new Map([[own.id, "This job"], ...others.map((job) => [job.id, runName(job)] as const)]);
  const missing = wanted.filter((id) => !names.has(id)).map(shortId);
  return (
    <div class="compared">
      <Settings own={own} others={others} missing={missing} />
      <Operators ids={[own.id, ...wanted]} nameOf={(id) => names.get(id) ?? shortId(id)} />
    </div>
  );
}

interface SettingsProps {
  readonly own: Job;
  readonly others: readonly Job[];
  /** Names of jobs whose settings the page does not have. */
  readonly missing: readonly string[];
}

function Settings({ own, others, missing }: SettingsProps) {
  const jobs = [own, ...others];
  const result = comparison(jobs);
  return (
    <>
      {remarks(jobs.length, result, missing).map((sentence) => (
        <p key={sentence} class="muted">
          {sentence}
        </p>
      ))}
      {result.found.length > 0 && <Differences found={result.found} others={others} />}
    </>
  );
}

function Differences({ found, others }: { found: readonly Difference[]; others: readonly Job[] }) {
  return (
    <details open data-testid="differences">
      <summary>{plural(found.length, "setting differs", "settings differ")}</summary>
      <div class="card" tabIndex={0} role="region" aria-label="Settings that differ">
        <table>
          <Head columns={["Setting", "This job", ...others.map(runName)]} />
          <tbody>
            {found.map(({ setting, values }) => (
              <tr key={setting}>
                <td class="mono">{setting}</td>
                {values.map((value, index) => (
                  <td key={index} class="mono setting">
                    {value ?? "–"}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

/** Read when it is opened; the sums are of the newest steps that each job has recorded. */
function Operators({ ids, nameOf }: { ids: readonly string[]; nameOf: (jobId: string) => string }) {
  const [open, setOpen] = useState(false);
  const [attempt, setAttempt] = useState(0);
  const [read, setRead] = useState<TimesRead | null>(null);
  useEffect(() => {
    setRead(null);
    if (!open) return;
    const reading = new AbortController();
    void readTimes(ids, api.operators, reading.signal).then((done) => done !== null && setRead(done));
    return () => reading.abort();
  }, [open, attempt, ids.join()]);
  const answered = answeredFor(read, ids);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)} data-testid="operator-times">
      <summary>Time of each operator</summary>
      {open && answered === null && <p class="muted">Adding up the recorded steps…</p>}
      {open && answered !== null && (
        <>
          <Refused refused={answered.refused} nameOf={nameOf} retry={() => setAttempt(attempt + 1)} />
          {answered.jobs.length > 0 && <OperatorTable own={ids[0]} answered={answered} nameOf={nameOf} />}
        </>
      )}
    </details>
  );
}

interface RefusedProps {
  readonly refused: Answered["refused"];
  readonly nameOf: (jobId: string) => string;
  readonly retry: () => void;
}

function Refused({ refused, nameOf, retry }: RefusedProps) {
  return (
    <>
      {refused.map(({ id, error }, index) => (
        <ErrorCard key={id} error={error} subject={nameOf(id)} {...(index === refused.length - 1 ? { retry } : {})} />
      ))}
    </>
  );
}

interface TableProps {
  /** The job that the others are measured against; if it was refused, nothing is. */
  readonly own: string | undefined;
  readonly answered: Answered;
  readonly nameOf: (jobId: string) => string;
}

function OperatorTable({ own, answered: { jobs, refused }, nameOf }: TableProps) {
  const rows = compared(jobs.map(({ times }) => times));
  const columns: Column[] = jobs.map(({ id }) => [nameOf(id), "num"]);
  const hasOwn = jobs[0]?.id === own;
  if (rows.length === 0) {
    const which = refused.length > 0 ? "jobs that could be read" : "jobs";
    return <p class="muted">None of the {which} has recorded steps of a graph that trains.</p>;
  }
  return (
    <>
      <p class="muted">
        A step's time in each operator, all replicas together, largest difference first
        {rows.length > MOST_OPERATORS && `: ${integer(MOST_OPERATORS)} of ${integer(rows.length)}`}
      </p>
      <div class="card" tabIndex={0} role="region" aria-label="Time of each operator by job">
        <table>
          <Head columns={["Operator", ["Role", "tiny-hide"], ...columns]} />
          <tbody>
            {rows.slice(0, MOST_OPERATORS).map(({ name, role, stepNs }) => (
              <tr key={name}>
                <td class="mono">{name}</td>
                <td class="tiny-hide">{role}</td>
                {stepNs.map((ns, index) => (
                  <td key={index} class="num">
                    {ns === null ? "–" : nanos(ns)}
                    {hasOwn && index > 0 && <Change before={stepNs[0] ?? null} now={ns} />}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** How much longer another job takes than this one. */
function Change({ before, now }: { before: number | null; now: number | null }) {
  if (before === null || now === null || before <= 0) return null;
  const share = Math.round((now / before - 1) * 100);
  return (
    <small class="muted">
      {" "}
      {share > 0 ? "+" : share < 0 ? "−" : "±"}
      {integer(Math.abs(share))}&nbsp;%
    </small>
  );
}
