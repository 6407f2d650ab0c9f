/** Jobs beside each other: the settings in which they differ, and the times of their operators. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { clock, integer, nanos, plural } from "../format";
import { type Column, ErrorCard, Head } from "../parts/basics";
import { jobsStore } from "../store/current";
import { type Difference, differences } from "../store/differences";
import type { JobStore } from "../store/job";
import { compared } from "../store/optimes";
import type { Job, OperatorTimes } from "../types";
import { useLoaded } from "./loaded";

const MOST_OPERATORS = 40;

export const runName = (job: Job): string => `${job.name} ${clock(job.created_at)}`;

export function Compared({ store, ids }: { store: JobStore; ids: readonly string[] }) {
  const own = store.job.value;
  const known = jobsStore.value?.jobs.value ?? [];
  const others = ids.flatMap((id) => known.find((job) => job.id === id) ?? []);
  if (own === null || others.length === 0) return null;
  const jobs = [own, ...others];
  return (
    <div class="compared">
      <Settings found={differences(jobs)} others={others} />
      <Operators jobs={jobs} others={others} />
    </div>
  );
}

function Settings({ found, others }: { found: readonly Difference[]; others: readonly Job[] }) {
  if (found.length === 0) return <p class="muted">The jobs have the same settings.</p>;
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
function Operators({ jobs, others }: { jobs: readonly Job[]; others: readonly Job[] }) {
  const [open, setOpen] = useState(false);
  const [times, setTimes] = useState<readonly OperatorTimes[] | null>(null);
  const { error, guarded } = useLoaded();
  const ids = jobs.map((job) => job.id).join();
  const load = () => guarded(async () => setTimes(await Promise.all(ids.split(",").map(api.operators))));
  useEffect(() => {
    setTimes(null);
    if (open) void load();
  }, [open, ids]);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)} data-testid="operator-times">
      <summary>Time of each operator</summary>
      {open && error !== null && <ErrorCard error={error} retry={() => void load()} />}
      {open && error === null && times === null && <p class="muted">Adding up the recorded steps…</p>}
      {open && times !== null && times.length === jobs.length && <OperatorTable times={times} others={others} />}
    </details>
  );
}

function OperatorTable({ times, others }: { times: readonly OperatorTimes[]; others: readonly Job[] }) {
  const rows = compared(times);
  const columns: Column[] = ["This job", ...others.map(runName)].map((name) => [name, "num"]);
  if (rows.length === 0) return <p class="muted">None of the jobs has recorded steps of a graph that trains.</p>;
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
                    {index > 0 && <Change before={stepNs[0] ?? null} now={ns} />}
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
