/** Of a failed job: who failed first, at which of the person's lines, after which step, and a button that runs it again. */
import { clock, integer, plural } from "../format";
import { Link } from "../parts/basics";
import { Submit } from "../parts/submit";
import { jobHref } from "../router";
import { type FramesOf, firstFailure, lastTraceback, type Traceback } from "../store/crash";
import type { JobStore } from "../store/job";
import type { Job, Replica } from "../types";

export function CrashCard({ job, store }: { job: Job; store: JobStore }) {
  store.logsVersion.value;
  store.stepVersion.value;
  const failed = job.state === "FAILED" ? firstFailure(job) : null;
  if (failed === null) return null;
  const lines = store.logs.byReplica.get(failed.id)?.lines ?? [];
  const found = lastTraceback(lines);
  const log = `${jobHref(job.id, "logs")}&replica=${encodeURIComponent(failed.id)}`;
  return (
    <section class="crash" aria-label="Failure" data-testid="crash">
      <div class="crash-who">
        <b>
          {failed.role} {failed.index} failed first
        </b>
        <span>{[endOf(failed), failed.host, clock(failed.finished_at)].filter(Boolean).join(" · ")}</span>
        <span data-testid="crash-last">{lastOf(store, failed)}</span>
        <span class="row">
          <Link class="btn small" href={found === null ? log : `${log}&line=${found.begins}`}>
            {found === null ? "Open its log" : "Open the log there"}
          </Link>
          {job.kind === "managed" && <Submit job={job} label="Run again" testId="run-again" />}
        </span>
      </div>
      {found === null ? <NoTraceback lines={lines} reason={failed.reason} /> : <Folded found={found} />}
    </section>
  );
}

function endOf(failed: Replica): string {
  if (failed.state === "LOST") return "lost";
  if (failed.signal !== null) return `signal ${failed.signal}`;
  return failed.exit_code === null ? "" : `exit code ${failed.exit_code}`;
}

/** What it had done: its last step, and the operator that finished last. */
function lastOf(store: JobStore, failed: Replica): string {
  const last = store.steps.lastOf(failed.stream);
  const op = last === undefined ? undefined : store.ops.graphs.get(last.hash)?.document?.ops[last.op];
  const step = Math.max(last?.step ?? 0, store.job.value?.latest.step ?? 0);
  const parts = step === 0 ? ["no step was reported"] : [`last step ${integer(step)}`];
  if (op !== undefined) parts.push(`last operator ${op.name}${op.source === "" ? "" : ` (${op.source})`}`);
  return parts.join(" · ");
}

function NoTraceback({ lines, reason }: { lines: readonly string[]; reason: string }) {
  const last = lines.slice(-6).join("\n");
  return (
    <pre class="crash-trace" tabIndex={0}>
      {last === "" ? reason || "It wrote nothing." : last}
    </pre>
  );
}

function Folded({ found }: { found: Traceback }) {
  return (
    <div class="crash-trace" tabIndex={0} role="group" aria-label="Traceback">
      {found.parts.map((part, index) =>
        part.own ? <Own key={index} part={part} /> : <Library key={index} part={part} />,
      )}
      <pre class="crash-error">{found.error}</pre>
    </div>
  );
}

const text = (part: FramesOf): string =>
  part.frames.map((frame) => [frame.at, ...frame.code.map((line) => `    ${line}`)].join("\n")).join("\n");

const Own = ({ part }: { part: FramesOf }) => <pre class="crash-own">{text(part)}</pre>;

function Library({ part }: { part: FramesOf }) {
  return (
    <details>
      <summary>
        {plural(part.frames.length, "frame")} in {part.where.join(", ")}
      </summary>
      <pre>{text(part)}</pre>
    </details>
  );
}
