/** The sentences in the header: what the job waits for or why it failed, and why its steps take as long as they do. */
import { effect, untracked, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { firm, sentenceAndError } from "../format";
import { Link, toneOf } from "../parts/basics";
import { jobHref, navigate, TABS, type Tab } from "../router";
import { evidenceHref, findingsOf, isCutOff, partsOf, saysWhy, shownFindings } from "../store/diagnosis";
import { isTerminal, type JobStore } from "../store/job";
import { nowMs } from "../store/session";
import type { Finding, Job } from "../types";
import { STACKS } from "./stacks";

/** Characters of a reason that are shown unasked: four lines in a window of 390 px. */
const LONG = 200;

export function Why({ job, store }: { job: Job; store: JobStore }) {
  useEffect(
    // A plain effect: one of a component asks for an animation frame each time, and this one runs every second.
    () =>
      effect(() => {
        const version = store.metricsVersion.value;
        const now = nowMs.value;
        const running = store.job.value?.state === "RUNNING";
        untracked(() => void store.diagnosis.tick(now, version, running));
      }),
    [store],
  );
  const findings = shownFindings(findingsOf(job, store.diagnosis.findings.value));
  const [sentence, error] = sentenceAndError(firm(job.why));
  const diagnosed = (job.state === "RUNNING" || isTerminal(job)) && findings.length > 0;
  if (job.why === "" && !diagnosed) return <span />;
  return (
    <div class={`why tone-${toneIn(job, findings)}`} data-testid="why">
      {saysWhy(job, findings) && job.why !== "" && <Reason key={job.id} sentence={sentence} error={error} />}
      {diagnosed && (
        <ul data-testid="diagnosis" aria-label={isTerminal(job) ? "Diagnosis of the last steps" : "Diagnosis"}>
          {findings.map((finding) => (
            <li key={`${finding.cause} ${finding.place}`}>
              <Sentence job={job} store={store} finding={finding} />
              {finding.cause === "stalled" && job.kind === "managed" && (
                <>
                  {" "}
                  <Link class="btn small" href={`${jobHref(job.id, "config")}#${STACKS}`}>
                    Python stacks
                  </Link>
                </>
              )}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

/** What the job waits for or why it failed; of a long text the first lines, until the others are asked for. */
function Reason({ sentence, error }: { sentence: string; error: string }) {
  const isOpen = useSignal(false);
  const isLong = sentence.length + error.length > LONG;
  return (
    <>
      <p id="why-reason" class={isLong && !isOpen.value ? "clipped" : ""}>
        {sentence}
        {error !== "" && <code>{error}</code>}
      </p>
      {isLong && (
        <button
          type="button"
          class="btn small"
          aria-expanded={isOpen.value}
          aria-controls="why-reason"
          onClick={() => {
            isOpen.value = !isOpen.value;
          }}
        >
          {isOpen.value ? "Show less" : "Show all"}
        </button>
      )}
    </>
  );
}

/** A link to the evidence: the view, and the operator in its graph. */
function Sentence({ job, store, finding }: { job: Job; store: JobStore; finding: Finding }) {
  const tab: Tab = TABS.find(([id]) => id === finding.tab)?.[0] ?? "overview";
  const href = evidenceHref(jobHref(job.id, tab), finding);
  return (
    <a
      href={href}
      data-cause={finding.cause}
      onClick={(event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
        event.preventDefault();
        if (finding.op !== null) store.chosenGraph.value = finding.graph;
        navigate(href);
      }}
    >
      {partsOf(finding.sentence).map((part, index) => (part.isName ? <code key={index}>{part.text}</code> : part.text))}
    </a>
  );
}

/** Quiet while all is well: a running job's sentence carries no colour of alarm. */
function toneIn(job: Job, findings: readonly Finding[]): string {
  if (job.state === "SUCCEEDED") return "quiet";
  if (job.state !== "RUNNING") return toneOf(job.state);
  if (isCutOff(job)) return toneOf("UNREACHABLE");
  const cause = findings[0]?.cause;
  if (cause === undefined || cause === "healthy") return "quiet";
  return cause === "stalled" ? "bad" : "warn";
}
